"""Divergences: values and gradients against loops written from the definitions, limits, supports, clips, masked entries."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped
from torch import Tensor

from trainers.losses import divergence


def checked(function: Callable) -> Callable:
    """With its shape annotations checked at each call."""
    return jaxtyped(typechecker=beartype)(function)


forward_kl = checked(divergence.forward_kl)
reverse_kl = checked(divergence.reverse_kl)
jsd = checked(divergence.jsd)
jsd_normalised = checked(divergence.jsd_normalised)
skew_forward = checked(divergence.skew_forward)
skew_reverse = checked(divergence.skew_reverse)
top_k_indices = checked(divergence.top_k_indices)
on_support = checked(divergence.on_support)
sampled_token = checked(divergence.sampled_token)


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q) if a > 0)


def mix(weight: float, p: list[float], q: list[float]) -> list[float]:
    return [weight * a + (1 - weight) * b for a, b in zip(p, q)]


def jsd_loop(t: list[float], s: list[float], beta: float) -> float:
    if beta == 0:
        return kl(t, s)
    if beta == 1:
        return kl(s, t)
    m = mix(beta, t, s)
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


# name -> (the function under test, the same from the definition on lists of probabilities)
FULL: dict[str, tuple[Callable, Callable]] = {
    "forward_kl": (forward_kl, kl),
    "reverse_kl": (reverse_kl, lambda t, s: kl(s, t)),
    **{
        f"jsd-{b}": (lambda t, s, b=b, **k: jsd(t, s, b, **k), lambda t, s, b=b: jsd_loop(t, s, b))
        for b in (0.0, 1e-3, 0.1, 0.5, 0.999, 1.0)
    },
    **{
        f"jsd_normalised-{b}": (
            lambda t, s, b=b, **k: jsd_normalised(t, s, b, **k),
            lambda t, s, b=b: jsd_loop(t, s, b) / (b * (1 - b) or 1),
        )
        for b in (0.0, 1e-3, 0.1, 0.5, 0.999, 1.0)
    },
    **{
        f"skew_forward-{w}": (lambda t, s, w=w, **k: skew_forward(t, s, w, **k), lambda t, s, w=w: kl(t, mix(w, t, s)))
        for w in (0.0, 0.1, 0.9, 1.0)
    },
    **{
        f"skew_reverse-{w}": (lambda t, s, w=w, **k: skew_reverse(t, s, w, **k), lambda t, s, w=w: kl(s, mix(w, s, t)))
        for w in (0.0, 0.1, 0.9, 1.0)
    },
}
everyone = pytest.mark.parametrize("name", FULL)


def logits(
    seed: int, rows: int = 5, vocab: int = 11, scale: float = 2.0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z_t, z_s = torch.randn(2, rows, vocab, generator=generator, dtype=torch.float64) * scale
    return z_t.to(dtype), z_s.to(dtype)


def value_and_grad(function: Callable, z_t: Tensor, z_s: Tensor) -> tuple[Tensor, Tensor]:
    z_s = z_s.clone().requires_grad_()
    value = function(z_t.log_softmax(-1), z_s.log_softmax(-1))
    (grad,) = torch.autograd.grad(value.sum(), z_s)
    return value.detach(), grad


@everyone
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_value_is_the_definition(name: str, dtype: torch.dtype, tolerance: float) -> None:
    function, loop = FULL[name]
    z_t, z_s = logits(0)
    value = function(z_t.to(dtype).log_softmax(-1), z_s.to(dtype).log_softmax(-1))
    expected = [loop(t.tolist(), s.tolist()) for t, s in zip(z_t.softmax(-1), z_s.softmax(-1))]
    assert value.dtype == dtype
    torch.testing.assert_close(value.double(), torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance)


def test_generalised_jsd_weighs_the_teacher_by_beta() -> None:
    """By hand, T = (.5, .3, .2), S = (.2, .2, .6), beta = .1: M = (.23, .21, .56), KL(T||M) = .289343, KL(S||M) = .003685."""
    log_t, log_s = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.2, 0.2, 0.6]]).log()
    assert jsd(log_t, log_s, 0.1).item() == pytest.approx(0.1 * 0.289343 + 0.9 * 0.003685, abs=2e-6)
    assert jsd(log_t, log_s, 0.9).item() == pytest.approx(jsd(log_s, log_t, 0.1).item(), abs=1e-7)
    assert jsd(log_t, log_s, 0.9).item() != pytest.approx(jsd(log_t, log_s, 0.1).item(), abs=1e-3)


@everyone
def test_gradient_is_that_of_the_value(name: str) -> None:
    z_t, z_s = logits(1, rows=2, vocab=5)
    log_t = z_t.log_softmax(-1)
    assert torch.autograd.gradcheck(lambda z: FULL[name][0](log_t, z.log_softmax(-1)), z_s.requires_grad_())


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_gradients_of_the_two_kls_have_their_closed_forms_without_tau_squared(tau: float) -> None:
    z_t, z_s = logits(2)
    t, s = (z_t / tau).softmax(-1), (z_s / tau).softmax(-1)
    for function in (forward_kl, reverse_kl):
        leaf = z_s.clone().requires_grad_()
        value = function((z_t / tau).log_softmax(-1), (leaf / tau).log_softmax(-1))
        (grad,) = torch.autograd.grad(value.sum(), leaf)
        expected = (s - t) / tau if function is forward_kl else s * ((s / t).log() - value.detach()[:, None]) / tau
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)


@everyone
@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
def test_equal_student_and_teacher_have_no_loss_and_no_gradient(name: str, scale: float) -> None:
    z, _ = logits(3, rows=16, vocab=1000, scale=scale, dtype=torch.float32)
    value, grad = value_and_grad(FULL[name][0], z, z)
    assert value.abs().max() <= 1e-6
    assert grad.abs().max() <= 1e-6


@everyone
@pytest.mark.parametrize("noise", [0.0, 1e-4, 1e-3, 1.0])
@pytest.mark.parametrize("scale", [0.3, 60.0])
def test_never_negative_with_large_bf16_logits_and_vocabulary(name: str, noise: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(4)
    z_t = (torch.randn(8, 32768, generator=generator) * scale / 3).clamp(-scale, scale).bfloat16()
    z_s = z_t.float() + noise * torch.randn(8, 32768, generator=generator)
    value = FULL[name][0](z_t.float().log_softmax(-1), z_s.log_softmax(-1))
    assert value.min() >= -1e-6


def test_jsd_is_the_kls_at_its_ends_by_definition_and_tends_to_zero_towards_them() -> None:
    log_t, log_s = (z.log_softmax(-1) for z in logits(5))
    torch.testing.assert_close(jsd(log_t, log_s, 0.0), forward_kl(log_t, log_s))
    torch.testing.assert_close(jsd(log_t, log_s, 1.0), reverse_kl(log_t, log_s))
    for beta, end in ((1e-3, forward_kl), (0.999, reverse_kl)):
        assert (jsd(log_t, log_s, beta) < 2e-3 * end(log_t, log_s)).all()


def test_normalised_jsd_has_the_kls_as_limits() -> None:
    log_t, log_s = (z.log_softmax(-1) for z in logits(6, scale=1.0))
    for end, beta in ((forward_kl, lambda e: e), (reverse_kl, lambda e: 1 - e)):
        limit = end(log_t, log_s)
        gaps = [(jsd_normalised(log_t, log_s, beta(e)) - limit).abs().max() / limit.max() for e in (1e-2, 1e-3, 1e-4)]
        assert gaps[0] > gaps[1] > gaps[2]
        assert gaps[1] < 2e-2
        assert gaps[2] < 2e-3
    in_fp32 = jsd_normalised(log_t.float(), log_s.float(), 1e-3)
    torch.testing.assert_close(in_fp32.double(), jsd_normalised(log_t, log_s, 1e-3), rtol=1e-4, atol=1e-5)


@everyone
def test_masked_vocabulary_entries_count_for_nothing(name: str) -> None:
    z_t, z_s = logits(7, vocab=8, dtype=torch.float32)
    value, grad = value_and_grad(FULL[name][0], z_t, z_s)
    for fill in (-math.inf, -1e10):
        pad = torch.full((5, 3), fill)
        masked_value, masked_grad = value_and_grad(FULL[name][0], torch.cat([z_t, pad], 1), torch.cat([z_s, pad], 1))
        torch.testing.assert_close(masked_value, value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(masked_grad[:, :8], grad, rtol=1e-5, atol=1e-6)
        assert (masked_grad[:, 8:] == 0).all()


@pytest.mark.parametrize("name", ["jsd-0.5", "jsd_normalised-0.001", "skew_forward-0.1", "skew_reverse-0.1"])
def test_mixtures_stay_finite_where_supports_differ(name: str) -> None:
    function, loop = FULL[name]
    z_t, z_s = logits(8, vocab=8, dtype=torch.float32)
    z_t[:, 0], z_s[:, 1] = -math.inf, -math.inf
    value, grad = value_and_grad(function, z_t, z_s)
    expected = torch.tensor([loop(t.tolist(), s.tolist()) for t, s in zip(z_t.double().softmax(-1), z_s.double().softmax(-1))])
    torch.testing.assert_close(value, expected.float(), rtol=1e-4, atol=1e-5)
    assert grad.isfinite().all()


def test_kl_is_infinite_where_only_its_second_argument_is_zero() -> None:
    log_t, log_s = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.0, -math.inf]])
    assert forward_kl(log_t, log_s).item() == math.inf
    assert reverse_kl(log_t, log_s).item() == pytest.approx(math.log(2))


# --- top-k ---


def on_top_k(function: Callable, k: int, support: str, tail: str) -> Callable:
    def restricted(log_t: Tensor, log_s: Tensor) -> Tensor:
        indices = top_k_indices(log_t if support == "teacher" else log_s.detach(), k)
        return function(on_support(log_t, indices, tail), on_support(log_s, indices, tail))

    return restricted


both_kls = pytest.mark.parametrize("kl_function", [forward_kl, reverse_kl])
supports = pytest.mark.parametrize("support", ["teacher", "student"])
tails = pytest.mark.parametrize("tail", ["bucket", "renormalise"])


@both_kls
@supports
@tails
def test_top_k_of_all_entries_is_the_full_kl(kl_function: Callable, support: str, tail: str) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        z_t, z_s = logits(9, vocab=12, dtype=dtype)
        value, grad = value_and_grad(kl_function, z_t, z_s)
        assert on_support(z_t.log_softmax(-1), top_k_indices(z_t, 12), tail).shape == (5, 12)  # no empty bucket
        for k in (12, 50):
            top_value, top_grad = value_and_grad(on_top_k(kl_function, k, support, tail), z_t, z_s)
            torch.testing.assert_close(top_value, value, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(top_grad, grad, rtol=tolerance, atol=tolerance)


@both_kls
@supports
def test_a_bucket_of_one_entry_is_the_full_kl(kl_function: Callable, support: str) -> None:
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        z_t, z_s = logits(10, vocab=12, scale=1.0, dtype=dtype)
        value, grad = value_and_grad(kl_function, z_t, z_s)
        top_value, top_grad = value_and_grad(on_top_k(kl_function, 11, support, "bucket"), z_t, z_s)
        torch.testing.assert_close(top_value, value, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(top_grad, grad, rtol=tolerance, atol=tolerance)


@both_kls
@supports
def test_bucketed_kl_grows_with_k_to_the_full_kl(kl_function: Callable, support: str) -> None:
    log_t, log_s = (z.log_softmax(-1) for z in logits(11, rows=50, vocab=12))
    values = torch.stack([on_top_k(kl_function, k, support, "bucket")(log_t, log_s) for k in range(1, 13)])
    assert (values >= -1e-12).all()
    assert (values.diff(dim=0) >= -1e-12).all()
    torch.testing.assert_close(values[-1], kl_function(log_t, log_s))


def test_top_k_values_by_hand() -> None:
    log_t, log_s = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log(), torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    teachers, students = ("teacher", [0.5, 0.3], [0.1, 0.2]), ("student", [0.05, 0.15], [0.4, 0.3])
    for support, t, s in (teachers, students):
        bucket = on_top_k(forward_kl, 2, support, "bucket")(log_t, log_s).item()
        assert bucket == pytest.approx(kl([*t, 1 - sum(t)], [*s, 1 - sum(s)]), abs=1e-6)
        renormalised = on_top_k(forward_kl, 2, support, "renormalise")(log_t, log_s).item()
        assert renormalised == pytest.approx(kl([x / sum(t) for x in t], [x / sum(s) for x in s]), abs=1e-6)


@both_kls
@supports
@tails
@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0])
def test_top_k_of_equal_distributions_has_no_loss_and_no_gradient(
    kl_function: Callable, support: str, tail: str, scale: float
) -> None:
    z, _ = logits(12, rows=16, vocab=100, scale=scale, dtype=torch.float32)
    for k in (1, 5, 99, 100):
        value, grad = value_and_grad(on_top_k(kl_function, k, support, tail), z, z)
        assert value.abs().max() <= 1e-6
        assert grad.abs().max() <= 1e-6


def test_a_tail_too_small_for_fp32_leaves_value_and_gradient_finite() -> None:
    z_t, z_s = torch.tensor([[60.0, 0.0, -1.0]]), torch.tensor([[50.0, 1.0, 0.0]])
    for function in (forward_kl, reverse_kl):
        for k in (1, 2):
            value, grad = value_and_grad(on_top_k(function, k, "teacher", "bucket"), z_t, z_s)
            assert value.isfinite().all()
            assert grad.isfinite().all()


# --- the sampled token ---


def test_expected_gradient_of_the_sampled_token_is_the_reverse_kls() -> None:
    """Exact expectation, by enumerating the vocabulary, on-policy and with importance weights from another distribution."""
    z_t, z_s = logits(13, rows=1, vocab=9)
    _, expected = value_and_grad(reverse_kl, z_t, z_s)
    log_t, log_rollout = z_t.log_softmax(-1), logits(14, rows=1, vocab=9)[0].log_softmax(-1)
    for drawn_from in (z_s.log_softmax(-1), log_rollout):
        leaf = z_s.clone().requires_grad_()
        log_s = leaf.log_softmax(-1)
        rollout_lp = None if drawn_from is not log_rollout else log_rollout[0]
        loss = sampled_token(log_t[0], log_s[0], rollout_lp)
        (grad,) = torch.autograd.grad((drawn_from[0].exp() * loss).sum(), leaf)
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)


def test_sampled_token_value_on_policy_is_the_log_ratio() -> None:
    lp_t, lp_s = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -0.5])
    torch.testing.assert_close(sampled_token(lp_t, lp_s), lp_s - lp_t)
    assert sampled_token(lp_s, lp_s).abs().max() == 0


def test_ratio_clip_stops_the_gradient_where_the_ratio_already_moved_far_enough() -> None:
    lp_rollout = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    lp_s = torch.tensor([-0.5, -0.5, -1.5, -1.05], requires_grad=True)  # ratio 1.65, 1.65, 0.61, 0.95
    lp_t = torch.tensor([-0.1, -2.0, -3.0, -0.1])  # advantage > 0, < 0, < 0, > 0
    loss = sampled_token(lp_t, lp_s, lp_rollout, ratio_clip=0.2)
    (grad,) = torch.autograd.grad(loss.sum(), lp_s)
    assert (grad != 0).tolist() == [False, True, False, True]
    assert loss[0].item() == pytest.approx(-0.4 * 1.2, abs=1e-6)


# --- clips ---


@everyone
def test_element_clip_caps_terms_before_the_sum(name: str) -> None:
    function = FULL[name][0]
    log_t, log_s = (z.log_softmax(-1) for z in logits(15))
    torch.testing.assert_close(function(log_t, log_s, clip_element=1e9), function(log_t, log_s), rtol=1e-9, atol=1e-12)
    assert (function(log_t, log_s, clip_element=1e-3) <= 11e-3 + 1e-9).all()


def test_element_clip_by_hand_can_make_a_token_negative_and_clipped_terms_have_no_gradient() -> None:
    t, s = [0.7, 0.2, 0.1], [0.2, 0.3, 0.5]
    terms = [a * math.log(a / b) for a, b in zip(t, s)]  # 0.877, -0.081, -0.161
    log_s = torch.tensor([s], dtype=torch.float64).log().requires_grad_()
    value = forward_kl(torch.tensor([t], dtype=torch.float64).log(), log_s, clip_element=0.05)
    assert value.item() == pytest.approx(0.05 + terms[1] + terms[2])
    assert value.item() < 0
    (grad,) = torch.autograd.grad(value.sum(), log_s)
    torch.testing.assert_close(grad, torch.tensor([[0.0, -0.2, -0.1]], dtype=torch.float64))


# --- properties ---


finite = st.floats(-30, 30, allow_nan=False, width=32)
pairs = st.integers(2, 8).flatmap(
    lambda v: st.tuples(st.lists(finite, min_size=v, max_size=v), st.lists(finite, min_size=v, max_size=v))
)


@settings(max_examples=60, deadline=None)
@given(pair=pairs, name=st.sampled_from(sorted(FULL)), shift=st.sampled_from([0.0, 17.0]))
def test_any_pair_gives_a_finite_non_negative_value_that_ignores_a_shift_of_logits(
    pair: tuple[list[float], list[float]], name: str, shift: float
) -> None:
    z_t, z_s = (torch.tensor([z]) for z in pair)
    value, grad = value_and_grad(FULL[name][0], z_t, z_s)
    shifted, _ = value_and_grad(FULL[name][0], z_t + shift, z_s - shift)
    assert value.isfinite().all()
    assert grad.isfinite().all()
    assert value.item() >= -1e-6
    torch.testing.assert_close(shifted, value, rtol=1e-4, atol=1e-4)
