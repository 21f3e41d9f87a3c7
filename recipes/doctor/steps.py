"""What a step is made of: shares of ranks, mini-batches, learning rates, and settings that do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybrid.config import OptimizerConfig
from hybrid.optim.schedules import lr_factor
from recipes.doctor.case import Case
from recipes.doctor.finding import Finding
from trainers.config import GRPOConfig, OPSDConfig, PolicyConfig, PPOConfig, RewardRecipe, RunConfig

UNEQUAL = 1.1  # largest of a step's mini-batches by the smallest, from where on it is warned of


def shares(case: Case) -> Iterator[Finding]:
    """Prompts and responses of a step over ranks and mini-batches."""
    config, ranks, rows = case.config, case.nproc, len(case.prompts)
    rollout = getattr(config, "rollout", None)
    prompts = config.train.batch_size if rollout is None else rollout.prompts_per_step
    samples = 2 if isinstance(config, RewardRecipe) else 1 if rollout is None else rollout.samples_per_prompt
    key = "train.batch_size" if rollout is None else "rollout.prompts_per_step"
    minibatches = config.updates.minibatches if isinstance(config, PolicyConfig) else 1
    kind, total = "of a pair" if isinstance(config, RewardRecipe) else "samples", prompts * samples
    found = (
        f"{prompts} prompts ({key}) x {samples} {kind} = {total} responses a step; mini-batches: {minibatches}, of "
        f"{total / minibatches:g} responses, {total / minibatches / ranks:g} on each rank of {ranks}"
    )
    all_read = case.prompts.num_rows != case.max_rows
    if all_read:
        passes = config.max_steps * prompts / rows
        found += f"; a pass over the data is {rows / prompts:.3g} steps, the run {passes:.3g} passes"
    remedies = []
    if prompts < ranks:
        remedies.append(f"{ranks - prompts} ranks have no prompt to answer: set {key} to {ranks} or more")
    if total // minibatches < ranks and total >= ranks:
        remedies.append("some ranks have nothing in some mini-batches and wait: lower updates.minibatches")
    if all_read and prompts > rows:
        remedies.append(f"a step takes rows of the data {prompts / rows:.3g} times: lower {key}")
    if -(-total // minibatches) > UNEQUAL * (total // minibatches):
        remedies.append(f"mini-batches are of unequal size: let updates.minibatches divide {total}")
    yield Finding("batch", found, "warn" if remedies else "ok", "; ".join(remedies))


def learning_rates(case: Case) -> Iterator[Finding]:
    """The rate of every optimizer step of the run, for each model that learns."""
    config = case.config
    updates = config.num_updates if isinstance(config, PolicyConfig) else config.max_steps
    yield _rate("engine.optimizer", config.engine.optimizer, updates)
    if isinstance(config, PPOConfig):
        yield _rate("critic.optimizer", config.critic.optimizer, config.max_steps * config.updates.steps)


def _rate(key: str, given: OptimizerConfig, steps: int) -> Finding:
    optimizer = given.until(steps)
    if optimizer.warmup_steps > steps:
        found = f"{key}: warmup_steps={optimizer.warmup_steps} of {steps} optimizer steps: lr={given.lr:g} is never reached"
        return Finding("learning rate", found, "warn", "lower warmup_steps")
    factors = [lr_factor(optimizer, step) for step in range(steps)]
    still = sum(factor == 0 for factor in factors)
    found = (
        f"{key}: {optimizer.name}, {steps} steps, lr {given.lr * factors[0]:.3g} first, {given.lr * max(factors):.3g} at most, "
    )
    found += f"{given.lr * factors[-1]:.3g} last"
    if given.lr == 0:
        return Finding("learning rate", found, "FAIL", f"no weight will change: set {key}.lr")
    if still > 1:
        remedy = f"{still} steps change nothing: set {key}.total_steps to {steps} (or leave it out), or min_lr_ratio above 0"
        return Finding("learning rate", found, "warn", remedy)
    return Finding("learning rate", found)


def inert(case: Case) -> Iterator[Finding]:
    """Settings that were given and do nothing, beside the one that would let them act."""
    found = list(_inert(case.config))
    for key, why in found:
        yield Finding("settings", f"{key} does nothing: {why}", "warn", "leave it out, or change what it waits for")
    if not found:
        yield Finding("settings", "every setting that was given acts")


def _inert(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, why it does nothing)."""

    def given(section: Any, name: str, *keys: str) -> list[str]:
        return [f"{name}.{key}".lstrip(".") for key in keys if key in section.model_fields_set]

    if isinstance(config, OPSDConfig):
        yield from _divergence("loss", config.loss)
    if not isinstance(config, PolicyConfig):
        return
    loss, kl, shaping = config.loss, config.reward_kl, config.shaping
    if kl.beta == 0:
        yield from ((key, "reward_kl.beta=0") for key in given(kl, "reward_kl", "estimator", "horizon"))
    elif kl.target is None:
        yield from ((key, "reward_kl.target is not set") for key in given(kl, "reward_kl", "horizon"))
    if loss.kl == 0:
        yield from ((key, "loss.kl=0") for key in given(loss, "loss", "kl_estimator"))
    if kl.beta == 0 and loss.kl == 0 and config.reference is not None and config.reference.model_fields_set:
        for key in given(config.reference, "reference", *config.reference.model_fields_set):
            yield key, "reward_kl.beta=0 and loss.kl=0, so that the reference is read for metrics only"
    if loss.reduction != "sum_per_constant":
        yield from ((key, f"loss.reduction={loss.reduction}") for key in given(loss, "loss", "constant_length"))
    if config.updates.steps == 1:
        why = "updates has one step on each rollout, whose ratio is 1"
        yield from ((key, why) for key in given(loss, "loss", "clip_low", "clip_high", "dual_clip", "ratio"))
    if config.mismatch.correct == "off":
        yield from ((key, "mismatch.correct=off") for key in given(config.mismatch, "mismatch", "level", "low", "high"))
    elif config.mismatch.correct == "truncate":
        yield from ((key, "mismatch.correct=truncate") for key in given(config.mismatch, "mismatch", "low"))
    if shaping.mask_truncated and shaping.missing_eos_penalty:
        yield "shaping.missing_eos_penalty", "shaping.mask_truncated takes the same responses out of the loss"
    only_score = config.reward_kl.beta == 0
    if isinstance(config, GRPOConfig) and shaping.normalise != "none" and config.estimator == "grpo" and only_score:
        yield "shaping.normalise", "estimator=grpo divides by the deviation of each group"
    if config.teacher is None:
        yield from ((key, "there is no teacher") for key in given(config, "", "distill", "distill_weight"))
    else:
        yield from _divergence("distill", config.distill)


def _divergence(name: str, loss: Any) -> Iterator[tuple[str, str]]:
    needs = {
        "beta": loss.divergence in ("jsd", "jsd_normalised"),
        "skew": loss.divergence in ("skew_forward", "skew_reverse"),
        "support": loss.top_k is not None,
        "tail": loss.top_k is not None,
        "constant_length": loss.reduction == "sum_per_constant",
    }
    why = {"support": "top_k is not set", "tail": "top_k is not set", "constant_length": f"reduction={loss.reduction}"}
    for key, acts in needs.items():
        if key in loss.model_fields_set and not acts:
            yield f"{name}.{key}", why.get(key, f"{name}.divergence={loss.divergence}")
