"""Benchmarks: what `hybrid bench NAME` runs, one file a name (rollout, score, swap, opsd, loss_head, scaling), each
`run(args)` giving a dict that is printed.

`measure`: repeated runs and memory; `phases`: where a step's time goes; `floor`: the matrix products alone; `machine`: what it
ran on; `engines`, `prompts`: what is run; `peers`, `peer_*`: other engines on the same work, each in a process of its own;
`first_token`: start-up in a fresh process.
"""
