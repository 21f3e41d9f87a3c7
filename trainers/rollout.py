"""Prompts -> rollouts: sampled by the policy, or given by the data. Spans are recorded here, when tokens are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from hybrid.mesh import raise_together
from inference_v2.types import Completion, SamplingParams
from trainers.config.sections import DataConfig
from trainers.data.order import DrawnPrompt, share
from trainers.types import Prompt, Rollout, Span


class Generator(Protocol):
    """What rollouts need: `HybridEngine`, or the runner inside `engine.generating()`."""

    def generate_together(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, keys: Sequence[int] | None = None
    ) -> dict[int, list[Completion]]: ...


def sample_rollouts(generator: Generator, prompts: Sequence[DrawnPrompt], sampling: SamplingParams) -> list[Rollout]:
    """`sampling.num_samples` rollouts per prompt of this rank's share of `prompts` (those of all ranks), prompt by prompt.

    Collective; a share may be empty. Tokens depend on (sampling.seed, the prompt's key) only, and who gets which rollouts on the
    tokens. Raises ValueError on every rank where the engine refused a prompt (too long for the model or the cache), naming the
    row.
    """
    completions = generator.generate_together([p.prompt.ids for p in prompts], sampling, [p.key for p in prompts])
    rollouts: list[Rollout] = []
    error = None
    try:
        rollouts = [_from_policy(prompts[i], c) for i, samples in completions.items() for c in samples]
    except ValueError as caught:
        error = caught
    raise_together(error)
    return rollouts


def require_room(
    prompts: Sequence[Prompt],
    max_model_len: int,
    *,
    max_new_tokens: int | Callable[[Prompt], int] = 0,
    given: bool = False,
    privileged: bool = False,
    reader: str = "",
) -> None:
    """Raises ValueError naming the longest row, before the first step, if prompt and response may be longer than the model takes.

    A response may have `max_new_tokens` (a function of the prompt where turns add up), or what the row gives (`given`); the
    prompt is the student's or the `privileged` one. `reader`: what the model is called, where it is not the policy.
    """

    def lengths(prompt: Prompt) -> tuple[int, int]:
        ids = prompt.privileged_ids if privileged and prompt.privileged_ids is not None else prompt.ids
        asked = max_new_tokens if isinstance(max_new_tokens, int) else max_new_tokens(prompt)
        return len(ids), max(asked, len(prompt.response_ids or ()) if given else 0)

    longest = max(prompts, key=lambda p: sum(lengths(p)))
    num_prompt, num_response = lengths(longest)
    if num_prompt + num_response > max_model_len:
        raise ValueError(
            f"data: row {longest.index} has {num_prompt} {'privileged ' if privileged else ''}prompt tokens, its response up to "
            f"{num_response}; allowed: {max_model_len} in all{reader and f' by the {reader}'}; lower data.max_prompt_tokens, "
            "max_new_tokens, data.max_response_tokens or rollout.environment.max_response_tokens, or set "
            "engine.rollout.engine.max_model_len"
        )


def require_privileged(prompts: Sequence[Prompt], data: DataConfig) -> None:
    """Raises ValueError naming a row in which a self-teacher reads what the student reads."""
    for prompt in prompts:
        if prompt.privileged_ids is None:
            raise ValueError(
                f"data: row {prompt.index} gives the self-teacher nothing that the student does not see; fill "
                f"data.privileged_column ({data.privileged_column!r}) or write data.privileged_template"
            )


def given_share(prompts: Sequence[DrawnPrompt], rank: int, world_size: int) -> list[DrawnPrompt]:
    """This rank's share of the prompts of all ranks, of about as many tokens of prompt and given response as the others'."""
    return share(prompts, rank, world_size, [len(p.prompt.ids) + len(p.prompt.response_ids or ()) for p in prompts])


def given_rollouts(prompts: Sequence[DrawnPrompt], weight_version: int) -> list[Rollout]:
    """The data's own responses as rollouts, one per prompt. Raises ValueError naming a row without a response."""
    rollouts = []
    for drawn in prompts:
        prompt = drawn.prompt
        if prompt.response_ids is None:
            raise ValueError(f"data: row {prompt.index} has no given response; fill data.response_column")
        count = len(prompt.response_ids)
        rollouts.append(
            Rollout(
                prompt=prompt,
                sample_index=0,
                ids=(*prompt.ids, *prompt.response_ids),
                spans=(Span(len(prompt.ids), len(prompt.ids) + count, "given"),),
                logprobs=(0.0,) * count,
                logprobs_raw=(0.0,) * count,
                finish_reason="stop",
                weight_version=weight_version,
                text=prompt.response or "",
                group=drawn.key,
            )
        )
    return rollouts


def with_privileged_prompt(rollout: Rollout) -> Rollout:
    """The rollout as the teacher reads it: the privileged prompt in place of the student's, the response's ids untouched. Counted
    positions therefore line up one to one with the student's."""
    privileged = rollout.prompt.privileged_ids
    if privileged is None:
        return rollout
    shift = len(privileged) - rollout.num_prompt
    return replace(
        rollout,
        prompt=replace(rollout.prompt, ids=privileged),
        ids=(*privileged, *rollout.response_ids),
        spans=tuple(Span(s.start + shift, s.stop + shift, s.source) for s in rollout.spans),
    )


def _from_policy(drawn: DrawnPrompt, completion: Completion) -> Rollout:
    prompt = drawn.prompt
    if completion.error is not None:
        raise ValueError(f"rollout: the engine refused the prompt of row {prompt.index}: {completion.error}")
    return Rollout(
        prompt=prompt,
        sample_index=completion.sample_index,
        ids=(*prompt.ids, *completion.token_ids),
        spans=(Span(len(prompt.ids), len(prompt.ids) + len(completion.token_ids), "policy"),),
        logprobs=completion.logprobs,
        logprobs_raw=completion.logprobs_raw,
        finish_reason=completion.finish_reason,
        weight_version=completion.weight_version,
        text=completion.text or "",
        group=drawn.key,
    )
