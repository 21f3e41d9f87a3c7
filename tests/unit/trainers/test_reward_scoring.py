"""All components of a step's responses, over ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from reward_cases import rollout

from hybrid.config import HybridConfig
from hybrid.mesh import open_mesh
from trainers.reward_scoring import RewardScorer
from trainers.rewards import RewardConfig


def errors_of_a_rank() -> list[str]:
    """What scoring and checking raise here, where the second component fails on rank 1 only, and what follows goes on."""
    mesh = open_mesh(HybridConfig(device="cpu"))
    scorer = RewardScorer(
        [RewardConfig(name="numeric_match"), RewardConfig(name="exact_match")],
        SimpleNamespace(mesh=mesh),
        HybridConfig(device="cpu"),
        micro_batch_tokens=8,
    )
    found = []

    def fails(items):
        raise OSError("no memory")

    works = scorer.functions._components[1]
    if mesh.rank == 1:
        scorer.functions._components[1] = SimpleNamespace(values=fails, check=fails)
    for call in (lambda: scorer.score([rollout("42")]), lambda: scorer.check([rollout("").prompt])):
        with pytest.raises(ValueError) as error:
            call()
        found.append(str(error.value))
    scorer.functions._components[1] = works
    _, metrics = scorer.score([rollout("42")])
    return [*found, str(metrics["reward_mean"])]


def test_an_error_on_one_rank_is_raised_on_all(pool2):
    expected = ["rank 1: reward exact_match: OSError: no memory"] * 2 + ["2.0"]
    assert pool2.run(errors_of_a_rank, timeout_s=60) == [expected, expected]
