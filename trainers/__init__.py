"""Algorithms on the engine's verbs.

Rooms:
    config      the YAML as typed, frozen classes (no torch)
    types       Prompt, Span, Rollout
    data/       datasets -> prompts; chat templates; batching
    rollout     prompts -> rollouts, by the hybrid engine
    rewards     reward functions by name
    losses/     pure functions of tensors
    scoring     teachers behind one seam: each fills one named field
    certificate log p_rollout against log p_train
    evaluation  greedy completions on held-out prompts, scored by a reward
    statistics  what a step's rollouts look like
    algorithm   what the loop asks of an algorithm
    opsd, sft   an algorithm each
    loop        the only training loop; it knows no algorithm
    run_folder  config.yaml, where to go on, the model to start from
    new_model   a small random model with a character tokenizer
"""
