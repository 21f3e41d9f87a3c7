"""DeepSpeed's config keys as typed, frozen classes. Each key is followed, or refused by name; the peer's own tuning knobs
are taken with a line that says so. No torch.

Rooms:
    load        a file, mapping or base64 text to a mapping: no key twice
    fields      what all sections share: unknown names, "auto", whole numbers
    zero        `zero_optimization`
    precision   `fp16`, `bf16`
    dtypes      `data_types`, `torch_autocast`, and ours: `module_precision`
    optimizers  `optimizer`
    schedulers  `scheduler`: the parameters of each learning-rate schedule
    monitoring  `flops_profiler`, `comms_logger`
    sections    the small ones
    foreign     keys that mean nothing here, and those that are refused, each with its reason
    top         TrainingConfig: all of it, the batch triangle, what every given key does
"""
