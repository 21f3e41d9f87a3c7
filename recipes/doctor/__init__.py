"""`hybrid doctor`: what a recipe, its models and its data say of themselves before anything is trained.

Rooms:
    finding     a row of the table, and the table
    case        a recipe with its models and data, opened as a run would open them, and no weights
    examine     the checks in their order; an error in one is a row, not the end
    vocabulary  tokenizers, rows of the vocabulary, special ids
    sampling    generation_config, temperature, truncation, evaluation
    boundary    where prompts end and responses begin
    models      who is the same as whom; dropout
    lengths     rows that were dropped, and room for responses
    steps       shares of ranks, mini-batches, learning rates, settings that do nothing
    reward      what rewards make of a right answer
    memory      bytes of one rank from shapes: the formulas
    plan        the formulas applied to a recipe, phase by phase
    machine     what this machine has for each rank
    footprint   the plan beside the machine, as rows
    tokens      token ids made readable
"""
