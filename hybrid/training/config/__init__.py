"""The sections of a DeepSpeed configuration as typed, frozen classes. No torch.

Rooms:
    fields      what all sections share: unknown names, "auto", whole numbers
    precision   fp16 and bf16
    schedulers  the parameters of each learning-rate schedule
"""
