"""From a file or a hub name to prompts, and from rollouts to micro-batches.

Rooms:
    sources     rows of a JSONL file, a parquet file or a hub data set
    templates   text or messages -> ids, made once; the privileged context
    prompts     rows -> Prompts, with counts of what was dropped
    order       which prompts a step gets: shuffled by (seed, epoch), position as JSON
    batching    rollouts -> packed micro-batches whose targets come from spans
"""
