"""From gradients on shards to new weights.

Rooms:
    optimizers  which optimizer, over which groups of parameters
    schedules   the learning rate of each step
    gradients   the global norm, clipping
    state       an optimizer's state as named tensors, for checkpoints
"""
