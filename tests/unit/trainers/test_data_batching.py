"""Micro-batches: targets come from spans, whatever ids pad, bos and eos have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.data.batching import group_by_length, make_batches, pack
from trainers.rollout import with_privileged_prompt
from trainers.types import Prompt, Rollout, Span


def rollout(prompt: tuple[int, ...], *parts: tuple[str, tuple[int, ...]], privileged: tuple[int, ...] | None = None) -> Rollout:
    """A rollout whose response is made of (source, ids) parts; token number i has log-prob -i, raw -i - 0.5."""
    spans, ids = [], list(prompt)
    for source, part in parts:
        spans.append(Span(len(ids), len(ids) + len(part), source))
        ids += part
    count = len(ids) - len(prompt)
    return Rollout(
        prompt=Prompt(index=0, ids=prompt, text="", privileged_ids=privileged),
        sample_index=0,
        ids=tuple(ids),
        spans=tuple(spans),
        logprobs=tuple(-float(i) for i in range(count)),
        logprobs_raw=tuple(-i - 0.5 for i in range(count)),
        finish_reason="stop",
        weight_version=1,
        text="",
    )


def test_each_response_token_is_predicted_by_the_token_before_it():
    batch = pack([rollout((5, 6), ("policy", (7, 8))), rollout((9,), ("given", (3,)))])
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9, 3]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 4, 6]
    assert batch.loss_index.tolist() == [1, 2, 4]
    assert batch.targets.tolist() == [7, 8, 3]
    assert batch.sequence_index.tolist() == [0, 0, 1]
    assert batch.response_index.tolist() == [0, 1, 0]
    assert batch.rollout_logprobs.tolist() == [0.0, -1.0, 0.0]
    assert batch.rollout_logprobs_raw.tolist() == [-0.5, -1.5, -0.5]
    assert batch.on_policy.tolist() == [True, True, False]


@pytest.mark.parametrize("end", [0, 2])
def test_the_first_end_counts_though_pad_has_its_id(end):
    """pad == eos, and either may be id 0: nothing is masked by id, and the ids are the ones that were sampled."""
    r = rollout((end, 4), ("policy", (end, 4, end)))
    batch = pack([r])
    assert batch.targets.tolist() == [end, 4, end]
    assert batch.token_ids.tolist() == list(r.ids)


def test_environment_tokens_are_context_only():
    batch = pack([rollout((5,), ("policy", (1, 2)), ("environment", (3, 4)), ("policy", (6,)))])
    assert batch.targets.tolist() == [1, 2, 6]
    assert batch.loss_index.tolist() == [0, 1, 4]
    assert batch.rollout_logprobs.tolist() == [0.0, -1.0, -4.0]


def test_with_prompt_the_prompts_own_tokens_count_too():
    batch = pack([rollout((5, 6, 7), ("given", (8,)))], with_prompt=True)
    assert batch.targets.tolist() == [6, 7, 8]
    assert batch.rollout_logprobs.tolist() == [0.0, 0.0, 0.0]


def test_empty_responses_and_empty_batches_have_no_targets():
    assert pack([rollout((5, 6))]).num_targets == 0
    empty = pack([])
    assert (empty.num_tokens, empty.num_sequences, empty.num_targets) == (0, 0, 0)
    assert make_batches([], 8) == []


def test_the_teachers_positions_line_up_with_the_students():
    r = rollout((5, 6), ("policy", (7, 8, 9)), privileged=(1, 2, 3, 4, 5, 6))
    student, teacher = pack([r]), pack([with_privileged_prompt(r)])
    assert teacher.targets.tolist() == student.targets.tolist() == [7, 8, 9]
    assert teacher.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert teacher.loss_index.tolist() == [5, 6, 7]
    plain = rollout((5,), ("policy", (7,)))
    assert with_privileged_prompt(plain) is plain


@given(st.lists(st.integers(1, 30), max_size=30), st.integers(1, 64))
def test_groups_hold_every_sequence_once_within_the_budget(lengths, budget):
    groups = group_by_length(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        padded = len(group) * max(lengths[i] for i in group)
        assert padded <= budget or len(group) == 1
    order = [lengths[i] for group in groups for i in group]
    assert order == sorted(order, reverse=True)


def test_scored_fields_follow_their_rollouts_into_the_batches():
    rollouts = [rollout((5,), ("policy", tuple(range(1, n + 1)))) for n in (1, 3, 2)]
    hidden = [torch.full((len(r.response_ids), 2), float(len(r.response_ids))) for r in rollouts]
    batches = make_batches(rollouts, 6, fields={"teacher_hidden": hidden})
    assert len(batches) > 1
    for batch in batches:
        counts = torch.bincount(batch.sequence_index)
        assert torch.equal(batch.teacher_hidden[:, 0], counts[batch.sequence_index].float())
