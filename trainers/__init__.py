"""Algorithms on the engine's verbs.

Rooms:
    config/       the YAML as typed, frozen classes (no torch)
    types         Prompt, Span, Rollout
    data/         datasets -> prompts; chat templates; batching
    rollout       prompts -> rollouts; sampler: by which backend, with which environment
    backends/     the engine, transformers, vLLM
    environments/ what answers the policy between its turns
    rewards/      reward functions by name; reward_scoring: these and reward models together
    deadline      calls of others' code, given up when they take too long (no torch)
    advantages/   from scores and log-probs to advantages, as pure functions
    losses/       pure functions of tensors
    scoring       teachers and references behind one seam: each fills one named field
    critic, ema, pretraining_mix   what PPO has beside its policy
    certificate   log p_rollout against log p_train
    evaluation    greedy completions on held-out prompts, scored by a reward
    statistics    what a step's rollouts look like; alarms: what a run's numbers say is going wrong
    algorithm     what the loop asks of an algorithm
    opsd, sft, ppo, grpo (over on_policy), reward_model   an algorithm each
    loop          the only training loop; it knows no algorithm
    run_folder    config.yaml, where to go on, the model to start from
    new_model     a small random model with a character tokenizer
"""
