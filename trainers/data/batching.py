"""Rollouts -> packed micro-batches. Targets come from the recorded spans, never from `ids != pad`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybrid.batch import Batch
from trainers.types import Rollout

TRAINED_SOURCES = ("policy", "given")


def counted_positions(rollout: Rollout, *, with_prompt: bool = False) -> list[int]:
    """Places in `rollout.ids` of the tokens that the loss predicts, ascending: those of policy and given spans, and with
    `with_prompt` the prompt's own (all but the first token, which nothing precedes)."""
    places = list(range(1, rollout.num_prompt)) if with_prompt else []
    for span in rollout.spans:
        if span.source in TRAINED_SOURCES:
            places += range(max(span.start, 1), span.stop)
    return places


def group_by_length(lengths: Sequence[int], micro_batch_tokens: int, *, packed: bool = False, unit: int = 1) -> list[list[int]]:
    """Indices of sequences in groups of at most `micro_batch_tokens` tokens, longest first: of those that are run, which are
    count x longest unless `packed`. A sequence that is longer on its own gets a group of its own: nothing is cut. Each `unit` of
    sequences in a row stays together, in its order."""
    if unit > 1:
        units = [lengths[i : i + unit] for i in range(0, len(lengths), unit)]
        sizes = [sum(u) if packed else max(u) * unit for u in units]
        grouped = group_by_length(sizes, micro_batch_tokens, packed=packed)
        return [[i * unit + k for i in group for k in range(len(units[i]))] for group in grouped]
    groups: list[list[int]] = []
    size = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[groups[-1][0]] if groups else 0
        size += lengths[index] if packed else longest
        if groups and size <= micro_batch_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
            size = lengths[index]
    return groups


def make_batches(
    rollouts: Sequence[Rollout],
    micro_batch_tokens: int,
    *,
    with_prompt: bool = False,
    packed: bool = False,
    fields: Mapping[str, Sequence[Tensor]] | None = None,
    unit: int = 1,
) -> list[Batch]:
    """Micro-batches over `rollouts`, length-sorted; `packed` if the model runs them unpadded. `fields[name][i]` [n_i, ...] fills
    the named Batch field for the counted tokens of rollout i (what a scorer returned). `unit` as in `group_by_length`."""
    groups = group_by_length([len(r.ids) for r in rollouts], micro_batch_tokens, packed=packed, unit=unit)
    return [
        pack(
            [rollouts[i] for i in group],
            with_prompt=with_prompt,
            fields={name: [values[i] for i in group] for name, values in (fields or {}).items()},
        )
        for group in groups
    ]


def pack(
    rollouts: Sequence[Rollout], *, with_prompt: bool = False, fields: Mapping[str, Sequence[Tensor]] | None = None
) -> Batch:
    """One Batch of the given sequences, in their order. No rollouts give the empty batch (a rank without work in a step)."""
    token_ids: list[int] = []
    positions: list[int] = []
    cu_seqlens = [0]
    loss_index: list[int] = []
    sequence_index: list[int] = []
    response_index: list[int] = []
    logprobs: list[float] = []
    logprobs_raw: list[float] = []
    on_policy: list[bool] = []
    for number, rollout in enumerate(rollouts):
        start, prompt = len(token_ids), rollout.num_prompt
        places = counted_positions(rollout, with_prompt=with_prompt)
        sampled = {p for span in rollout.spans if span.source == "policy" for p in range(span.start, span.stop)}
        token_ids += rollout.ids
        positions += range(len(rollout.ids))
        cu_seqlens.append(len(token_ids))
        loss_index += [start + p - 1 for p in places]
        sequence_index += [number] * len(places)
        response_index += range(len(places))
        logprobs += [rollout.logprobs[p - prompt] if p >= prompt else 0.0 for p in places]
        logprobs_raw += [rollout.logprobs_raw[p - prompt] if p >= prompt else 0.0 for p in places]
        on_policy += [p in sampled for p in places]
    index = torch.tensor(loss_index, dtype=torch.long)
    tokens = torch.tensor(token_ids, dtype=torch.long)
    return Batch(
        token_ids=tokens,
        positions=torch.tensor(positions, dtype=torch.long),
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.long),
        loss_index=index,
        targets=tokens[index + 1],
        sequence_index=torch.tensor(sequence_index, dtype=torch.long),
        response_index=torch.tensor(response_index, dtype=torch.long),
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        rollout_logprobs_raw=torch.tensor(logprobs_raw, dtype=torch.float32),
        on_policy=torch.tensor(on_policy, dtype=torch.bool),
        **{name: torch.cat(list(values)) for name, values in (fields or {}).items() if len(values)},
    )


def read_at(batch: Batch, places: Sequence[Sequence[int]]) -> Batch:
    """The same sequences, read at the given tokens of each (and not before the counted ones): for scores, not for losses."""
    starts = batch.cu_seqlens[:-1].tolist()
    index = [start + place for start, own in zip(starts, places, strict=True) for place in own]
    sequence = [number for number, own in enumerate(places) for _ in own]
    return Batch(
        token_ids=batch.token_ids,
        positions=batch.positions,
        cu_seqlens=batch.cu_seqlens,
        loss_index=torch.tensor(index, dtype=torch.long),
        targets=torch.zeros(len(index), dtype=torch.long),
        sequence_index=torch.tensor(sequence, dtype=torch.long),
    )
