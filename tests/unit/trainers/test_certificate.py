"""The parity certificate: it holds for a correct engine, and sees each way in which rollout and training may part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from trainer_cases import tiny_folder

from hybrid.config import HybridConfig
from hybrid.engine import HybridEngine
from inference_v2.types import SamplingParams
from trainers.certificate import Certificate, Certifier, is_due
from trainers.config import CertificateConfig
from trainers.data.batching import make_batches
from trainers.data.order import DrawnPrompt
from trainers.losses import cross_entropy_token_loss
from trainers.rollout import given_rollouts, sample_rollouts
from trainers.types import Prompt, Rollout

DRAWN = [DrawnPrompt(Prompt(index=i, ids=tuple(range(3, 4 + i)), text="", response_ids=(5, 1)), epoch=0) for i in range(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_folder(path, attention_dropout=0.3)
    return path


@pytest.fixture
def engine(folder):
    engine = HybridEngine.from_pretrained(str(folder), HybridConfig())
    yield engine
    engine.close()


def sampled(engine: HybridEngine) -> list[Rollout]:
    return sample_rollouts(engine, DRAWN, SamplingParams(max_new_tokens=8, temperature=0.7))


def certificate(
    engine: HybridEngine, rollouts: list[Rollout], *, temperature: float = 0.7, dtype: str = "float32", **config: float
) -> Certificate:
    certifier = Certifier(CertificateConfig(**config), temperature=temperature, compute_dtype=dtype)
    engine.forward_backward(make_batches(rollouts, 20), certifier.watch(cross_entropy_token_loss()))
    engine.optimizer.zero_grad()
    return certifier.certificate(engine.mesh)


def spoilt(rollouts: list[Rollout], value: float) -> list[Rollout]:
    """With `value` added to the first token's log-prob."""
    first, *rest = rollouts
    return [replace(first, logprobs_raw=(first.logprobs_raw[0] + value, *first.logprobs_raw[1:])), *rest]


def test_it_holds_over_all_sampled_tokens(engine):
    rollouts = sampled(engine)
    good = certificate(engine, [*rollouts, *given_rollouts(DRAWN, weight_version=1)])
    assert good.holds
    assert 0 < good.max <= 1e-4
    assert good.num_tokens == sum(len(r.response_ids) for r in rollouts)  # given tokens have no rollout log-prob
    assert certificate(engine, []).num_tokens == 0


def test_one_wrong_token_is_seen(engine):
    rollouts = sampled(engine)
    one = certificate(engine, spoilt(rollouts, 1e-3))
    assert not one.holds
    assert one.beyond == pytest.approx(1 / one.num_tokens)
    assert one.max == pytest.approx(1e-3, rel=0.05)
    not_a_number = certificate(engine, spoilt(rollouts, float("nan")))
    assert not not_a_number.holds
    assert not_a_number.max == float("inf")


def test_weights_that_changed_since_the_rollout_are_seen(engine):
    rollouts = sampled(engine)
    for shard in engine.model.local_shards().values():
        shard.mul_(1.01)
    assert not certificate(engine, rollouts).holds


def test_another_temperature_in_the_loss_is_seen(engine):
    rollouts = sampled(engine)
    assert not certificate(engine, rollouts, temperature=0.75).holds


def test_dropout_in_the_training_forward_is_seen(folder):
    """It is the forward that trains which is compared, not one in evaluation mode."""
    engine = HybridEngine.from_pretrained(str(folder), HybridConfig(dropout=True))
    assert not certificate(engine, sampled(engine)).holds
    engine.close()


def test_it_is_due_on_the_first_rollout_and_every_n_steps():
    every_third, once = CertificateConfig(every=3), CertificateConfig(every=0)
    assert [s for s in range(4, 11) if is_due(every_third, s, first=s == 4)] == [4, 6, 9]
    assert [s for s in range(4, 11) if is_due(once, s, first=s == 4)] == [4]


def test_bf16_is_judged_by_the_mean_unless_a_bound_is_set(engine):
    far = spoilt(sampled(engine), 0.6)
    assert certificate(engine, far, dtype="bfloat16").holds
    assert not certificate(engine, far, dtype="bfloat16", bound=0.5).holds
    assert not certificate(engine, far, dtype="bfloat16", mean_bound=1e-3).holds
