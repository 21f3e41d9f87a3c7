"""Who generates a rollout: the engine itself, transformers' `generate`, or vLLM in a process of its own. Importing this package
imports no torch.

Rooms:
    config        which backend, and vLLM's settings; what of the sampling each of them knows
    generators    one protocol, and the factory
    hf            transformers: slow, and not ours, so what the others are compared with
    vllm          vLLM seen from the trainer: pushes weights, asks for completions
    vllm_worker   the script that the other interpreter runs
    weights       the policy's weights, gathered layer by layer for somebody else
    requests      prompts that are refused, completions, and errors that all ranks hear of
"""
