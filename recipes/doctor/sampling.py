"""What responses are drawn from, what the losses take them to be drawn from, and what others would draw from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from recipes.doctor.case import Case
from recipes.doctor.finding import Finding
from trainers.config import OPSDConfig, PolicyConfig, RewardRecipe, SamplingConfig

# Fields of a generation_config that change which tokens transformers' `generate` draws, and their neutral values.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "do_sample": (None, False, True),  # greedy or not is everybody's own choice
    "temperature": (None, 1.0),
    "top_k": (None, 0),
    "top_p": (None, 1.0),
    "min_p": (None, 0.0),
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "length_penalty": (None, 1.0),
    "num_beams": (None, 1),
    "penalty_alpha": (None,),
    "guidance_scale": (None, 1.0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "bad_words_ids": (None,),
    "sequence_bias": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "stop_strings": (None,),
}


def generation_config(case: Case) -> Iterator[Finding]:
    """What the policy's generation_config.json would do to samples if it were read."""
    policy = case.policy
    file = case.model(policy).path / "generation_config.json"
    if not file.is_file():
        yield Finding("generation_config", f"the policy has none ({policy})")
        return
    given = json.loads(file.read_text(encoding="utf-8"))
    changing = {key: given[key] for key, neutral in NEUTRAL.items() if key in given and given[key] not in neutral}
    if not changing:
        yield Finding("generation_config", f"the policy's changes no sample ({policy})")
        return
    rollout = getattr(case.config, "rollout", None)
    if rollout is None:
        ours: dict[str, Any] = {}
        use = "responses are given, and evaluations greedy"
    else:
        ours = rollout.sampling.model_dump()
        use = f"the recipe samples with {drawn_from(rollout.sampling)}"
    apart = {key: value for key, value in changing.items() if ours.get(key) != value}
    found = f"{file} asks for {', '.join(f'{k}={v}' for k, v in changing.items())}; it is never read here: {use}"
    if not apart:
        yield Finding("generation_config", f"{found}, which is the same")
        return
    remedy = (
        f"the exported folder carries the file, and transformers' generate and vLLM apply it silently: remove {', '.join(apart)} "
        "from it, or give your settings wherever the trained model is sampled"
    )
    yield Finding("generation_config", found, "warn", remedy)


def sampling(case: Case) -> Iterator[Finding]:
    """Temperature and truncation of rollouts beside what the losses assume."""
    config = case.config
    rollout = getattr(config, "rollout", None)
    if rollout is None:
        yield Finding("sampling", "nothing is sampled in training")
        return
    readers = ["loss", *(name for name in ("teacher", "reference") if case.role(name) is not None)]
    found = (
        f"responses are drawn with {drawn_from(rollout.sampling)}; {', '.join(readers)}: log-probs at temperature "
        f"{rollout.sampling.temperature:g}, of the whole distribution"
    )
    gradient = _policy_gradient(config)
    if gradient is None or not rollout.sampling.truncates:
        yield Finding("sampling", found)
        return
    remedy = (
        f"{gradient} takes tokens to be drawn from softmax(z / temperature), and they are not: set top_k=0, top_p=1, min_p=0, "
        "min_new_tokens=0 and no penalties in rollout.sampling"
    )
    yield Finding("sampling", found, "warn", remedy)


def evaluation(case: Case) -> Iterator[Finding]:
    """Greedy completions of held-out prompts beside what training lets a response be."""
    config = case.config
    if config.data.eval is None:
        yield Finding("evaluation", "data.eval is not set: nothing shows whether the model became better", "ok")
        return
    held_out = case.held_out
    assert held_out is not None
    if isinstance(config, RewardRecipe):
        yield Finding("evaluation", f"{len(held_out)} held-out pairs are ranked")
        return
    limit, reward = config.eval.max_new_tokens, config.eval.reward
    found = f"{len(held_out)} held-out prompts, greedy (temperature 0), up to {limit} tokens, scored by {reward}"
    rollout = getattr(config, "rollout", None)
    apart = []
    if rollout is not None and config.eval.max_new_tokens < rollout.sampling.max_new_tokens:
        apart.append(f"max_new_tokens {rollout.sampling.max_new_tokens} in rollouts")
    if rollout is not None and {*config.eval.stop} != {*rollout.sampling.stop}:
        apart.append(f"stop {list(rollout.sampling.stop)} in rollouts, {list(config.eval.stop)} in evaluations")
    if not apart:
        yield Finding("evaluation", found)
        return
    remedy = "the score is of other responses than are trained: set eval.max_new_tokens and eval.stop as in rollout.sampling"
    yield Finding("evaluation", f"{found}; {'; '.join(apart)}", "warn", remedy)


def drawn_from(sampling: SamplingConfig) -> str:
    """The settings that are not neutral, and always the temperature."""
    neutral = SamplingConfig()
    names = [n for n in SamplingConfig.model_fields if n not in ("max_new_tokens", "temperature", "stop", "stop_token_ids")]
    changed = [f"{n}={getattr(sampling, n)}" for n in names if getattr(sampling, n) != getattr(neutral, n)]
    return f"temperature={sampling.temperature:g} and {', '.join(changed) or 'no truncation or penalty'}"


def _policy_gradient(config: Any) -> str | None:
    """The loss of this recipe that weighs sampled tokens by their own log-probs, if one does."""
    if isinstance(config, OPSDConfig) and config.loss.divergence == "sampled_token":
        return "loss.divergence=sampled_token"
    return "the policy gradient of this recipe" if isinstance(config, PolicyConfig) else None
