"""From gradients on shards to new weights.

Rooms:
    optimizers      which optimizer, over which groups of parameters
    muon            momentum, orthogonalized (owners: whole matrices on one rank each)
    adafactor       row and column statistics of whole matrices
    shards          how a parameter lies on ranks
    schedules       the learning rate of each step
    peer_schedules  DeepSpeed's schedules, and rates, their closed forms (no torch)
    loss_scale      by what a loss is multiplied before its backward in fp16 (no torch)
    gradients       the global norm, clipping
    host            state and step in host memory
    update          one step: check, unscale, clip, step
    state           an optimizer's state as named tensors, for checkpoints
"""
