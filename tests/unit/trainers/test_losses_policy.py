"""Losses of policy optimisation: values and gradients against float64 loops, expectations, masked tokens, kernels, chunks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from beartype import beartype
from cpu_builds import BUILDS
from jaxtyping import jaxtyped
from torch import Tensor

from hybrid.batch import Batch
from hybrid.loss_head import TokenLoss, chunked_loss
from inference_v2.head import Head
from inference_v2.kernels import REFERENCE, BuildError, cpu_kernels
from trainers.config.policy import PolicyLoss
from trainers.losses.policy import policy_token_loss, reward_pair_loss, value_token_loss
from trainers.losses.reductions import denominator, target_weights

H, V = 8, 37
LENGTHS = (5, 0, 1, 7)  # counted positions of each response; two tokens of an environment lie among those of the last
PLACES = (range(2, 7), (), (2,), (2, 3, 4, 7, 8, 9, 10))  # where in its sequence each of them is read, after a prompt of 3

EVERY: dict[str, dict[str, Any]] = {
    "ppo": {},
    "asymmetric": {"clip_low": 0.1, "clip_high": 0.4},
    "dual_clip": {"dual_clip": 1.5},
    "entropy": {"entropy": 0.1},
    "kl-k2": {"kl": 0.3},
    "kl-k3": {"kl": 0.3, "kl_estimator": "k3"},
    "kl-k3_value": {"kl": 0.3, "kl_estimator": "k3_value"},
    "gspo": {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.1},
    "all": {"dual_clip": 1.5, "entropy": -0.05, "kl": 0.2, "clip_high": 0.3},
    "gspo-all": {"ratio": "sequence", "dual_clip": 1.1, "entropy": 0.05, "kl": 0.2, "clip_high": 0.05},
}
everyone = pytest.mark.parametrize("settings", EVERY.values(), ids=EVERY)


def log_softmax(row: list[float], temperature: float = 1.0) -> list[float]:
    scaled = [z / temperature for z in row]
    top = max(scaled)
    log_mass = top + math.log(sum(math.exp(z - top) for z in scaled))
    return [z - log_mass for z in scaled]


@dataclass(frozen=True)
class Case:
    hidden: Tensor  # [N, H]
    head: Head
    batch: Batch


def make_case(temperature: float = 1.0, seed: int = 0) -> Case:
    """Ratios from 0.4 to 2.5 on both sides of every clip, advantages of both signs and 0, a reference and mismatch weights."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([2 + max(places, default=1) for places in PLACES])
    starts = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    loss_index = torch.cat([start + torch.tensor(places, dtype=torch.long) for start, places in zip(starts, PLACES)])
    n, total = len(loss_index), int(starts[-1])
    hidden = torch.randn(total, H, generator=generator)[loss_index]
    head = Head(torch.randn(V + 3, H, generator=generator), torch.randn(V + 3, generator=generator), vocab_limit=V)
    targets = torch.randint(0, V, (n,), generator=generator)
    lp = (head.logits(hidden).double() / temperature).log_softmax(-1).gather(1, targets[:, None]).squeeze(1).float()
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    of_response = torch.tensor([0.3, 0.0, 0.2, -0.3])
    old = lp - torch.linspace(-0.9, 0.9, n)[torch.randperm(n, generator=generator)] - of_response[sequence]
    log_ratio = torch.zeros(len(LENGTHS)).index_add(0, sequence, lp - old) / torch.tensor(LENGTHS).clamp(min=1)
    advantages = torch.randn(n, generator=generator)
    advantages[3] = 0.0
    batch = Batch(
        token_ids=torch.randint(0, V, (total,), generator=generator),
        positions=torch.cat([torch.arange(int(size)) for size in sizes]),
        cu_seqlens=starts,
        loss_index=loss_index,
        targets=targets,
        sequence_index=sequence,
        old_logprobs=old,
        reference_logprobs=lp + torch.randn(n, generator=generator),
        advantages=advantages,
        mismatch_weights=torch.rand(n, generator=generator) * 2,
        sequence_log_ratio=log_ratio[sequence],
    )
    return Case(hidden.requires_grad_(), replace(head, weight=head.weight.requires_grad_()), batch)


def by_hand(
    loss: PolicyLoss, row: list[float], t: int, batch: Batch, temperature: float
) -> tuple[float, list[float], dict[str, float]]:
    """Value, gradient in the logits and metrics of token t, without a tensor operation."""
    log_p = log_softmax(row, temperature)
    p = [math.exp(x) for x in log_p]
    y = int(batch.targets[t])
    lp = log_p[y]
    of_lp = [((v == y) - p[v]) / temperature for v in range(len(row))]
    entropy = -sum(a * b for a, b in zip(p, log_p))
    of_entropy = [-p[v] * (log_p[v] + entropy) / temperature for v in range(len(row))]

    a, w = float(batch.advantages[t]), float(batch.mismatch_weights[t])
    old, ref = float(batch.old_logprobs[t]), float(batch.reference_logprobs[t])
    ratio = math.exp(lp - old) if loss.ratio == "token" else math.exp(float(batch.sequence_log_ratio[t]))
    low, high = 1 - loss.clip_low, 1 + loss.clip_high
    # PPO's cases: which bound, if any, the smaller objective is at
    at_low, at_high = a < 0 and ratio < low, a > 0 and ratio > high
    at_dual = loss.dual_clip is not None and a < 0 and ratio > loss.dual_clip
    value, slope = -a * ratio, -a * ratio
    if at_low or at_high:
        value, slope = -a * (low if at_low else high), 0.0
    if at_dual:
        value, slope = -a * loss.dual_clip, 0.0
    metrics = {
        "policy_loss": w * value,
        "ratio": ratio,
        "clipped_low": float(at_low),
        "clipped_high": float(at_high),
        "approx_kl": math.exp(lp - old) - 1 - (lp - old),
        "kl": math.exp(ref - lp) - 1 - (ref - lp),
        "entropy": entropy,
        "logprob": lp,
    }
    if loss.dual_clip is not None:
        metrics["dual_clipped"] = float(at_dual)
    total, of_lp_total = w * value - loss.entropy * entropy, w * slope
    d = lp - ref
    estimates = {"k2": (d**2 / 2, d), "k3": (metrics["kl"], d), "k3_value": (metrics["kl"], 1 - math.exp(-d))}
    kl_value, kl_slope = estimates[loss.kl_estimator]
    total += loss.kl * kl_value
    of_lp_total += loss.kl * kl_slope
    return total, [of_lp_total * a - loss.entropy * b for a, b in zip(of_lp, of_entropy)], metrics


@everyone
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_values_and_gradients_are_those_of_a_loop(settings: dict[str, Any], temperature: float, reduction: str) -> None:
    """Through the chunked head: the gradients of hidden states and head, relative to their largest element."""
    case, loss = make_case(temperature), PolicyLoss(**settings)
    weights = target_weights(case.batch, reduction)
    leaves = (case.hidden, case.head.weight)
    found, sums = chunked_loss(case.hidden, case.head, case.batch, policy_token_loss(loss, temperature), 4, weights)
    gradients = torch.autograd.grad(found, leaves)

    logits = case.hidden.detach().double() @ case.head.weight.detach().double().T[:, :V] + case.head.bias[:V].double()
    loops = [by_hand(loss, row, t, case.batch, temperature) for t, row in enumerate(logits.tolist())]
    terms = [w * value for w, (value, _, _) in zip(weights.tolist(), loops)]
    assert abs(found.item() - sum(terms)) <= 2e-6 * sum(map(abs, terms))
    of_logits = weights.double()[:, None] * torch.tensor([gradient for _, gradient, _ in loops], dtype=torch.float64)
    of_weight = torch.zeros(V + 3, H, dtype=torch.float64)
    of_weight[:V] = of_logits.T @ case.hidden.detach().double()
    of_hidden = of_logits @ case.head.weight.detach().double()[:V]
    for name, given, wanted in zip(("hidden", "weight"), gradients, (of_hidden, of_weight)):
        assert (given.double() - wanted).abs().max() <= 2e-6 * wanted.abs().max(), name
    assert sums.keys() == loops[0][2].keys()
    for name, value in sums.items():
        assert value.item() == pytest.approx(sum(metrics[name] for _, _, metrics in loops), rel=5e-6, abs=5e-6), name


def test_every_case_of_the_clip_occurs_in_these_tests() -> None:
    case = make_case()
    _, sums = chunked_loss(case.hidden, case.head, case.batch, policy_token_loss(PolicyLoss(dual_clip=1.5), 1.0), 4)
    n = case.batch.num_targets
    assert all(0 < sums[name].item() < n for name in ("clipped_low", "clipped_high", "dual_clipped"))
    assert sums["clipped_low"] + sums["clipped_high"] + sums["dual_clipped"] < n
    gspo = PolicyLoss(**EVERY["gspo"])
    _, sums = chunked_loss(case.hidden, case.head, case.batch, policy_token_loss(gspo, 1.0), 4)
    assert 0 < sums["clipped_low"] + sums["clipped_high"] < n


@everyone
def test_any_chunk_length_gives_the_same(settings: dict[str, Any]) -> None:
    case, token_loss = make_case(), policy_token_loss(PolicyLoss(**settings), 1.0)
    whole, sums = chunked_loss(case.hidden, case.head, case.batch, token_loss, 1000)
    expected = torch.autograd.grad(whole, (case.hidden, case.head.weight))
    for length in (1, 3, 5):
        loss, found = chunked_loss(case.hidden, case.head, case.batch, token_loss, length)
        torch.testing.assert_close(loss, whole, rtol=2e-6, atol=2e-6)
        for given, wanted in zip(torch.autograd.grad(loss, (case.hidden, case.head.weight)), expected):
            assert (given - wanted).abs().max() <= 2e-6 * wanted.abs().max()
        for name, value in sums.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("march", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@everyone
def test_the_kernels_losses_are_the_plain_ones(settings: dict[str, Any], temperature: float, march: str) -> None:
    try:
        kernels = cpu_kernels(march)
    except BuildError as error:
        pytest.skip(str(error))
    case = make_case(temperature)
    found = []
    for backend in (REFERENCE, kernels):
        token_loss = policy_token_loss(PolicyLoss(**settings), temperature, backend)
        loss, sums = chunked_loss(case.hidden, case.head, case.batch, token_loss, 4)
        found.append([loss, *torch.autograd.grad(loss, (case.hidden, case.head.weight)), *sums.values()])
    for wanted, given in zip(*found, strict=True):
        assert (given - wanted).abs().max() <= 2e-6 * wanted.abs().max() + 1e-6
    names = list(sums)
    assert names == list(chunked_loss(case.hidden, case.head, case.batch, policy_token_loss(PolicyLoss(**settings), 1.0), 4)[1])


def masked_logits(case: Case) -> tuple[Tensor, Batch]:
    """Vocabulary entries at -inf, two of them targets; log-probs of -inf in every combination with a target's own; a response
    whose ratio no float holds."""
    logits = case.head.logits(case.hidden).detach()
    logits[:, :5] = -math.inf
    targets = case.batch.targets.clamp(min=5)
    targets[0], targets[6] = 2, 3
    old, reference = case.batch.old_logprobs.clone(), case.batch.reference_logprobs.clone()
    old[[0, 1]], reference[[0, 2]] = -math.inf, -math.inf
    log_ratio = torch.where(case.batch.sequence_index == 0, 1e3, case.batch.sequence_log_ratio)
    fields = {"old_logprobs": old, "reference_logprobs": reference, "sequence_log_ratio": log_ratio}
    return logits, replace(case.batch, targets=targets, **fields)


@pytest.mark.parametrize("march", [None, "native"])
@everyone
def test_impossible_tokens_make_nothing_nan(settings: dict[str, Any], march: str | None) -> None:
    try:
        kernels = REFERENCE if march is None else cpu_kernels(march)
    except BuildError as error:
        pytest.skip(str(error))
    logits, batch = masked_logits(make_case())
    for given in (batch, replace(batch, old_logprobs=None, sequence_log_ratio=None)):
        z = logits.clone().requires_grad_()
        per_token, metrics = policy_token_loss(PolicyLoss(**settings), 0.7, kernels)(z, given)
        (gradient,) = torch.autograd.grad(per_token.sum(), z)
        assert per_token.isfinite().all()
        assert gradient.isfinite().all()
        assert not gradient[:, :5].any()  # also of the targets that cannot be
        assert all(value.isfinite().all() for value in metrics.values())


@everyone
def test_a_position_that_does_not_count_may_hold_anything(settings: dict[str, Any]) -> None:
    """NaN and infinities in each field of positions of weight 0: to the bit as if these were 0."""
    case, token_loss = make_case(), policy_token_loss(PolicyLoss(**settings), 1.0)
    weights = torch.ones(case.batch.num_targets)
    weights[[1, 4]] = 0.0
    names = ("old_logprobs", "reference_logprobs", "advantages", "mismatch_weights", "sequence_log_ratio")
    found = []
    for fill in (0.0, math.nan, math.inf, -math.inf):
        fields = {name: getattr(case.batch, name).masked_fill(weights == 0, fill) for name in names}
        loss, sums = chunked_loss(case.hidden, case.head, replace(case.batch, **fields), token_loss, 4, weights)
        found.append([loss, *torch.autograd.grad(loss, (case.hidden, case.head.weight)), *sums.values()])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_without_old_log_probs_the_policy_is_the_one_that_sampled(ratio: str, temperature: float) -> None:
    """Ratio exactly 1, and REINFORCE's gradient -A grad lp, clipped nowhere."""
    case = make_case()
    batch = replace(case.batch, old_logprobs=None, sequence_log_ratio=None, mismatch_weights=None)
    logits = case.head.logits(case.hidden.detach()).requires_grad_()
    loss = PolicyLoss(ratio=ratio, clip_low=1e-6, clip_high=1e-6, dual_clip=1.000001)
    per_token, metrics = policy_token_loss(loss, temperature)(logits, batch)
    assert torch.equal(metrics["ratio"], torch.ones(batch.num_targets))
    assert torch.equal(per_token, -batch.advantages)
    assert not any(metrics[name].any() for name in ("clipped_low", "clipped_high", "dual_clipped", "approx_kl"))
    lp = (logits / temperature).log_softmax(-1).gather(1, batch.targets[:, None]).squeeze(1)
    (expected,) = torch.autograd.grad((-batch.advantages * lp).sum(), logits)
    (given,) = torch.autograd.grad(per_token.sum(), logits)
    torch.testing.assert_close(given, expected, rtol=2e-6, atol=1e-7)


def test_log_probs_of_the_same_weights_give_a_ratio_of_one() -> None:
    """What a rollout recorded at temperature 0.7 is what the loss computes at 0.7."""
    case = make_case()
    logits = case.head.logits(case.hidden)
    recorded = torch.log_softmax(logits / 0.7, -1).gather(1, case.batch.targets[:, None]).squeeze(1).detach()
    batch = replace(case.batch, old_logprobs=recorded)
    for temperature, is_one in ((0.7, True), (1.0, False)):
        _, metrics = policy_token_loss(PolicyLoss(), temperature)(logits, batch)
        assert torch.allclose(metrics["ratio"], torch.ones(len(recorded)), atol=1e-6) is is_one


# -- the KL's gradient in expectation, by enumerating a small vocabulary


def expected_kl_gradient(estimator: str, z: Tensor, reference: Tensor, temperature: float) -> Tensor:
    """sum over y of S(y) times the gradient of token y's loss: advantages are 0, so it is the KL's alone. [V]"""
    size = len(z)
    logits = z.expand(size, size).clone().requires_grad_()
    zeros = torch.zeros(size, dtype=torch.long)
    batch = Batch(
        zeros, zeros, torch.tensor([0, size]), zeros, torch.arange(size), zeros,
        advantages=torch.zeros(size), reference_logprobs=reference,
    )  # fmt: skip
    loss = PolicyLoss(kl=1.0, kl_estimator=estimator)
    per_token, _ = policy_token_loss(loss, temperature)(logits, batch)
    (gradient,) = torch.autograd.grad(per_token, logits, (z / temperature).softmax(-1))
    return gradient.sum(0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("estimator", "direction"), [("k2", "reverse"), ("k3", "reverse"), ("k3_value", "forward")])
def test_the_expected_gradient_of_the_kl_loss(estimator: str, direction: str, temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    z, reference = torch.randn(6, generator=generator), torch.randn(6, generator=generator).log_softmax(-1)
    found = expected_kl_gradient(estimator, z, reference, temperature)
    log_s, log_r = log_softmax(z.tolist(), temperature), reference.tolist()
    s, r = [math.exp(x) for x in log_s], [math.exp(x) for x in log_r]
    kl = sum(p * (a - b) for p, a, b in zip(s, log_s, log_r))
    expected = {
        "reverse": [p * (a - b - kl) / temperature for p, a, b in zip(s, log_s, log_r)],
        "forward": [(p - q) / temperature for p, q in zip(s, r)],
    }
    assert found.tolist() == pytest.approx(expected[direction], rel=2e-6, abs=2e-7)
    other = "forward" if direction == "reverse" else "reverse"
    assert found.tolist() != pytest.approx(expected[other], rel=0.05)


def test_the_kl_loss_pulls_towards_the_reference_however_far_it_is() -> None:
    """Beyond the clamp of the exponent the gradient neither vanishes nor turns."""
    zero = torch.zeros(1, dtype=torch.long)
    for far in (10.0, 30.0, 1e3):
        for estimator in ("k2", "k3", "k3_value"):
            z = torch.tensor([[-far, 0.0]], requires_grad=True)
            batch = Batch(
                zero, zero, torch.tensor([0, 1]), zero, zero, zero,
                advantages=torch.zeros(1), reference_logprobs=torch.tensor([-0.1]),
            )  # fmt: skip
            per_token, _ = policy_token_loss(PolicyLoss(kl=1.0, kl_estimator=estimator), 1.0)(z, batch)
            (gradient,) = torch.autograd.grad(per_token.sum(), z)
            assert gradient[0, 0] < 0 < gradient[0, 1]


# -- GSPO, from its sequence objective


def test_gspo_is_the_derivative_of_the_sequence_objective() -> None:
    """Zheng et al. 2025, eq. 5: mean over responses of min(s A, clip(s) A), s = exp(mean of lp - old), differentiated as it
    stands, while the loss sees one chunk at a time and s as a number. With a clip that holds no response, and one that does."""
    case = make_case()
    batch = replace(case.batch, mismatch_weights=None)
    of_response = torch.tensor([1.5, 0.0, -0.5, -1.0])
    batch = replace(batch, advantages=of_response[batch.sequence_index])
    for clip in (0.9, 0.01):
        hidden = case.hidden.detach().double().requires_grad_()
        logits = hidden @ case.head.weight.detach().double().T[:, :V] + case.head.bias[:V].double()
        lp = logits.log_softmax(-1).gather(1, batch.targets[:, None]).squeeze(1)
        objective, held = [], 0
        for i, n in enumerate(LENGTHS):
            if n:
                mine = batch.sequence_index == i
                s = ((lp - batch.old_logprobs)[mine].sum() / n).exp()
                unclipped, clipped = s * of_response[i], s.clamp(1 - clip, 1 + clip) * of_response[i]
                held += bool(clipped < unclipped)
                objective.append(torch.minimum(unclipped, clipped))
        expected = -sum(objective) / len(objective)
        assert held in ((0,) if clip == 0.9 else (1, 2))
        loss = PolicyLoss(ratio="sequence", clip_low=clip, clip_high=clip, reduction="sequence_mean")
        weights, divisor = target_weights(batch, loss.reduction), denominator(batch, loss.reduction)
        found, _ = chunked_loss(case.hidden, case.head, batch, policy_token_loss(loss, 1.0), 3, weights / divisor)
        assert found.item() == pytest.approx(expected.item(), rel=2e-6, abs=2e-6)
        (given,), (wanted,) = torch.autograd.grad(found, case.hidden), torch.autograd.grad(expected, hidden)
        assert (given.double() - wanted).abs().max() <= 2e-6 * wanted.abs().max()


@pytest.mark.parametrize(
    ("field", "settings"),
    [("advantages", {}), ("reference_logprobs", {"kl": 0.1}), ("sequence_log_ratio", {"ratio": "sequence"})],
)
def test_a_missing_field_is_named_with_a_remedy(field: str, settings: dict[str, Any]) -> None:
    case = make_case()
    with pytest.raises(ValueError, match=rf"batch\.{field} is None .*; "):
        policy_token_loss(PolicyLoss(**settings), 1.0)(case.head.logits(case.hidden), replace(case.batch, **{field: None}))


def test_what_is_not_needed_may_be_missing() -> None:
    case = make_case()
    bare = replace(case.batch, reference_logprobs=None, sequence_log_ratio=None, mismatch_weights=None)
    logits = case.head.logits(case.hidden)
    per_token, metrics = policy_token_loss(PolicyLoss(), 1.0)(logits, bare)
    weighted, _ = policy_token_loss(PolicyLoss(), 1.0)(logits, case.batch)
    assert "kl" not in metrics
    assert torch.equal(per_token * case.batch.mismatch_weights, weighted)
    empty = case.batch.select(0, 0)
    per_token, metrics = policy_token_loss(PolicyLoss(kl=0.1, entropy=0.1), 1.0)(logits[:0], empty)
    assert per_token.shape == (0,)
    assert all(value.shape == (0,) for value in metrics.values())


# -- value


def value_case() -> tuple[Tensor, Head, Batch]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(sum(LENGTHS), H, generator=generator)
    head = Head(torch.randn(1, H, generator=generator) / 3, torch.randn(1, generator=generator))
    value = head.logits(hidden).squeeze(1)
    old = value + 0.5 * torch.randn(len(value), generator=generator)
    old[2], old[5] = value[2], value[5]
    returns = old + torch.randn(len(value), generator=generator)
    return hidden.requires_grad_(), head, replace(make_case().batch, values=old, returns=returns)


@pytest.mark.parametrize("clip", [None, 0.2, 0.01])
def test_the_value_loss_is_that_of_a_loop(clip: float | None) -> None:
    hidden, head, batch = value_case()
    expected, of_hidden, metrics = 0.0, [], dict.fromkeys(("value_loss", "value", "return", "value_clipped"), 0.0)
    weight, bias = head.weight[0].tolist(), head.bias.item()
    for row, old, target in zip(hidden.tolist(), batch.values.tolist(), batch.returns.tolist()):
        value = sum(a * b for a, b in zip(row, weight)) + bias
        error, slope, held = (value - target) ** 2, value - target, False
        if clip is not None:
            clipped = min(max(value, old - clip), old + clip)
            held = (clipped - target) ** 2 > error and abs(value - old) > clip
            if held:
                error, slope = (clipped - target) ** 2, 0.0
        expected += error / 2
        of_hidden.append([slope * w for w in weight])
        for name, x in zip(metrics, (error / 2, value, target, float(held))):
            metrics[name] += x
    assert clip is None or 0 < metrics["value_clipped"] < batch.num_targets
    for length in (1, 4, 1000):
        found, sums = chunked_loss(hidden, head, batch, value_token_loss(clip), length)
        assert found.item() == pytest.approx(expected, rel=2e-6)
        (gradient,) = torch.autograd.grad(found, hidden)
        wanted = torch.tensor(of_hidden, dtype=torch.float64)
        assert (gradient.double() - wanted).abs().max() <= 2e-6 * wanted.abs().max()
        assert {name: value.item() for name, value in sums.items()} == pytest.approx(metrics, rel=1e-5)


def test_within_its_range_the_clip_of_a_value_is_not_there() -> None:
    """To the bit: old + (value - old) would be another number, and some of its errors larger."""
    generator = torch.Generator().manual_seed(9)
    old = 0.2 * torch.rand(1000, generator=generator) - 0.1
    value = 0.2 * torch.rand(1000, 1, generator=generator) - 0.1
    index, returns = torch.arange(1000), 1.001 * value.squeeze(1)
    batch = Batch(index, index, torch.tensor([0, 1000]), index, index, torch.zeros_like(index), values=old, returns=returns)
    per_token, metrics = value_token_loss(0.2)(value, batch)
    assert torch.equal(per_token, value_token_loss(None)(value, batch)[0])
    assert not metrics["value_clipped"].any()


def test_the_value_loss_names_what_is_wrong() -> None:
    hidden, head, batch = value_case()
    logits = head.logits(hidden)
    for field, clip in (("returns", None), ("values", 0.2)):
        with pytest.raises(ValueError, match=rf"batch\.{field} is None .*; "):
            value_token_loss(clip)(logits, replace(batch, **{field: None}))
    value_token_loss(None)(logits, replace(batch, values=None))
    with pytest.raises(ValueError, match=r"logits \(13, 2\); allowed: \[C, 1\]"):
        value_token_loss(None)(logits.expand(-1, 2), batch)


# -- reward model


def pair_batch(pairs: int, margins: Tensor | None = None) -> Batch:
    index = torch.arange(2 * pairs)
    return Batch(index, torch.zeros_like(index), torch.arange(2 * pairs + 1), index, index, index, margins=margins)


@pytest.mark.parametrize("centring", [0.0, 0.05])
@pytest.mark.parametrize("with_margins", [False, True])
def test_the_pair_loss_is_that_of_a_loop(centring: float, with_margins: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    hidden = (2 * torch.randn(12, H, generator=generator)).requires_grad_()
    head = Head(torch.randn(1, H, generator=generator))
    margins = torch.rand(12, generator=generator)
    batch = pair_batch(6, margins if with_margins else None)
    scores = [sum(a * b for a, b in zip(row, head.weight[0].tolist())) for row in hidden.tolist()]
    losses, slopes = [], []
    for i in range(0, 12, 2):
        chosen, rejected = scores[i : i + 2]
        x = chosen - rejected - (margins[i].item() if with_margins else 0.0)
        losses += [math.log1p(math.exp(-x)) + centring * (chosen + rejected) ** 2] * 2
        sigmoid, centre = 1 / (1 + math.exp(x)), 2 * centring * (chosen + rejected)
        slopes += [2 * (centre - sigmoid), 2 * (centre + sigmoid)]
    metrics = {
        "accuracy": sum(c > r for c, r in zip(scores[::2], scores[1::2])),
        "margin": sum(scores[::2]) - sum(scores[1::2]),
        "chosen_score": sum(scores[::2]),
        "rejected_score": sum(scores[1::2]),
    }
    assert 0 < metrics["accuracy"] < 6
    for length in (2, 4, 1000):
        found, sums = chunked_loss(hidden, head, batch, reward_pair_loss(centring), length)
        assert found.item() == pytest.approx(sum(losses), rel=2e-6)
        (gradient,) = torch.autograd.grad(found, hidden)
        wanted = torch.tensor(slopes, dtype=torch.float64)[:, None] * head.weight.double()
        assert (gradient.double() - wanted).abs().max() <= 2e-6 * wanted.abs().max()
        assert {name: value.item() / 2 for name, value in sums.items()} == pytest.approx(metrics, rel=1e-5)
    per_token, _ = reward_pair_loss(centring)(head.logits(hidden), batch)
    assert per_token.tolist() == pytest.approx(losses, rel=5e-6)


def test_the_pair_loss_is_finite_and_still_pulls_at_scores_far_apart() -> None:
    z = torch.tensor([[-1e4], [1e4]], requires_grad=True)
    per_token, metrics = reward_pair_loss()(z, pair_batch(1))
    assert per_token.tolist() == [2e4, 2e4]
    assert torch.autograd.grad(per_token.mean(), z)[0].squeeze(1).tolist() == [-1.0, 1.0]
    assert metrics["accuracy"].tolist() == [0.0, 0.0]
    per_token, metrics = reward_pair_loss()(torch.zeros(2, 1), pair_batch(1))
    assert metrics["accuracy"].tolist() == [0.0, 0.0]  # equal scores rank nothing


def test_the_pair_loss_refuses_half_a_pair_and_other_heads() -> None:
    with pytest.raises(ValueError, match="3 scores; allowed: pairs"):
        reward_pair_loss()(torch.zeros(3, 1), pair_batch(2).select(0, 3))
    with pytest.raises(ValueError, match=r"allowed: \[C, 1\]"):
        reward_pair_loss()(torch.zeros(4, 3), pair_batch(2))


# -- shapes


def test_shapes_are_those_of_the_annotations() -> None:
    case = make_case()
    checked = jaxtyped(typechecker=beartype)
    hidden, head, batch = value_case()
    losses: list[tuple[TokenLoss, Tensor, Batch]] = [
        (policy_token_loss(PolicyLoss(**settings), 1.0), case.head.logits(case.hidden), case.batch) for settings in EVERY.values()
    ]
    losses += [(value_token_loss(0.2), head.logits(hidden), batch), (reward_pair_loss(), torch.zeros(4, 1), pair_batch(2))]
    for (token_loss, logits, given), requires_grad in itertools.product(losses, (True, False)):
        with torch.set_grad_enabled(requires_grad):
            per_token, metrics = checked(token_loss)(logits, given)
        assert all(value.shape == per_token.shape and not value.requires_grad for value in metrics.values())
