"""The training engine behind `hybrid.initialize`: any module, DeepSpeed's config keys and its loop of forward, backward, step.

Rooms:
    config/     the keys, typed and checked (no torch)
    start       initialize: config, module, optimizer, schedule and data to one engine
    engine      TrainingEngine: the loop's verbs (facts: what one may ask of it)
    layout      units, dtypes and host memory, as the config says
    units       which parts of a module are gathered together
    release     gathered weights freed at their last use in a backward
    usage       which parameters a step reaches on any rank; whether all ranks ran the same layers
    precision   the dtype of each module, of its shards, and what is cast between them
    parameters  parameters and optimizers of the module as it came, found again after sharding
    generation  rollouts of the module that is trained
    compression the largest entries of gradients only
    eigenvalue  the largest of each block's Hessian (curvature: power iteration)
    meters      phases, throughput, operations, collectives
    scalars     loggers
    data        the training data's loader
    checkpoints save_checkpoint and load_checkpoint (engine_state, json_values: what is not a tensor; background: asynchronous
                saves; hf_folder, universal: other folders that are read)
    weights     save_16bit_model, module_state_dict
"""
