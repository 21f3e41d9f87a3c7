"""Token losses: what they compare, cut, mix and report, alone and through the chunked head."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cpu_builds import BUILDS
from torch import Tensor

from hybrid.batch import Batch
from hybrid.loss_head import chunked_loss
from inference_v2.head import Head
from inference_v2.kernels import REFERENCE, BuildError, cpu_kernels, get_kernels
from trainers.config import DistillLoss
from trainers.losses import cross_entropy_token_loss, divergence, divergence_token_loss
from trainers.opsd import with_first_token

N, H = 13, 8

EVERY = {
    "forward_kl": {"divergence": "forward_kl"},
    "reverse_kl": {"divergence": "reverse_kl"},
    **{f"jsd-{b}": {"divergence": "jsd", "beta": b} for b in (0.0, 1e-3, 0.5, 0.999, 1.0)},
    **{f"jsd_normalised-{b}": {"divergence": "jsd_normalised", "beta": b} for b in (0.0, 1e-3, 0.5, 0.999, 1.0)},
    "skew_forward": {"divergence": "skew_forward"},
    "skew_reverse": {"divergence": "skew_reverse"},
    **{
        f"{d}-{support}-{tail}": {"divergence": d, "top_k": 5, "support": support, "tail": tail}
        for d in ("forward_kl", "reverse_kl")
        for support in ("teacher", "student")
        for tail in ("bucket", "renormalise")
    },
    "sampled_token": {"divergence": "sampled_token"},
    "sampled_token-clip": {"divergence": "sampled_token", "ratio_clip": 0.2},
    "clip_element": {"divergence": "forward_kl", "clip_element": 0.05},
    "clip_token": {"divergence": "reverse_kl", "clip_token": 0.5},
    "cross_entropy": {"divergence": "jsd", "cross_entropy": 0.3},
}
everyone = pytest.mark.parametrize("settings", EVERY.values(), ids=EVERY)


def make_batch(n: int = N, vocab: int = 37, teacher_width: int = 6, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (n + 1,), generator=generator)
    return Batch(
        token_ids=ids,
        positions=torch.arange(n + 1),
        cu_seqlens=torch.tensor([0, n + 1]),
        loss_index=torch.arange(n),
        targets=ids[1:],
        sequence_index=torch.zeros(n, dtype=torch.long),
        rollout_logprobs_raw=-3 * torch.rand(n, generator=generator) - 2,
        teacher_hidden=torch.randn(n, teacher_width, generator=generator),
        on_policy=torch.arange(n) % 3 > 0,
    )


def student_and_teacher(student_rows: int = 40, teacher_rows: int = 48, limit: int | None = 37) -> tuple[Tensor, Head, Head]:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(N, H, generator=generator), torch.randn(student_rows, H, generator=generator)
    bias, teacher = torch.randn(student_rows, generator=generator), torch.randn(teacher_rows, 6, generator=generator)
    head = Head(weight.requires_grad_(), bias.requires_grad_(), vocab_limit=limit)
    return hidden.requires_grad_(), head, Head(teacher, vocab_limit=limit)


def metric(sums: dict[str, Tensor], name: str) -> float:
    return sums[name].item()


@everyone
def test_chunked_equals_plain(settings: dict[str, Any]) -> None:
    hidden, head, teacher = student_and_teacher()
    head = replace(head, softcap=6.0, scale=1.2)
    token_loss, batch = divergence_token_loss(DistillLoss(**settings), teacher, 2.0), make_batch()
    leaves = (hidden, head.weight, head.bias)
    loss, sums = chunked_loss(hidden, head, batch, token_loss, 4)
    per_token, metrics = token_loss(head.logits(hidden), batch)
    torch.testing.assert_close(loss, per_token.sum(), rtol=2e-6, atol=2e-6)
    for name, value in metrics.items():
        torch.testing.assert_close(sums[name], value.sum(), rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(per_token.sum(), leaves)
    for given, wanted in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        assert (given - wanted).abs().max() <= 2e-6 * wanted.abs().max()


@everyone
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(settings: dict[str, Any]) -> None:
    hidden, head, _ = student_and_teacher()
    settings = settings | {"cross_entropy": 0.0}
    teacher = Head(head.weight.detach(), head.bias.detach(), head.vocab_limit)
    batch = replace(make_batch(), teacher_hidden=hidden.detach())
    loss, sums = chunked_loss(hidden, head, batch, divergence_token_loss(DistillLoss(**settings), teacher, 0.7), 4)
    gradients = torch.autograd.grad(loss / N, (hidden, head.weight, head.bias))
    assert abs(loss.item()) / N <= 1e-6
    assert all(g.abs().max() <= 1e-6 for g in gradients)
    assert metric(sums, "top1_agreement") == N


@everyone
def test_only_rows_of_the_common_vocabulary_count(settings: dict[str, Any]) -> None:
    """40 student rows, 48 teacher rows, a tokenizer of 37 ids: as if both had 37 rows, whatever the others hold."""
    hidden, head, teacher = student_and_teacher()
    loss, batch = DistillLoss(**settings), make_batch()
    expected, _ = chunked_loss(
        hidden, Head(head.weight[:37], head.bias[:37]), batch, divergence_token_loss(loss, Head(teacher.weight[:37]), 1.0), 4
    )
    with torch.no_grad():
        head.weight[37:], teacher.weight[37:] = 1e3, float("nan")
    given, _ = chunked_loss(hidden, head, batch, divergence_token_loss(loss, teacher, 1.0), 4)
    assert torch.equal(given, expected)
    # one of the two heads without a limit: the rows that both have
    for student_limit, teacher_limit in ((37, None), (None, 37)):
        token_loss = divergence_token_loss(loss, replace(teacher, vocab_limit=teacher_limit), 1.0)
        by_rows, _ = chunked_loss(hidden, replace(head, vocab_limit=student_limit), batch, token_loss, 4)
        assert torch.equal(by_rows, expected)


def test_temperature_divides_both_logits_and_nothing_multiplies_the_loss() -> None:
    hidden, head, teacher = student_and_teacher()
    batch = make_batch()
    loss, _ = chunked_loss(hidden, head, batch, divergence_token_loss(DistillLoss(divergence="forward_kl"), teacher, 2.0), 4)
    log_t = (teacher.logits(batch.teacher_hidden).double() / 2).log_softmax(-1)
    log_s = (head.logits(hidden).double() / 2).log_softmax(-1)
    expected = F.kl_div(log_s, log_t, log_target=True, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    entropy, _ = chunked_loss(hidden, head, batch, cross_entropy_token_loss(2.0), 4)
    assert entropy.item() == pytest.approx(F.nll_loss(log_s, batch.targets, reduction="sum").item(), rel=1e-5)


def test_loss_is_zero_only_where_teacher_and_student_are_aligned() -> None:
    hidden, head, _ = student_and_teacher()
    teacher = Head(head.weight.detach(), head.bias.detach(), head.vocab_limit)
    token_loss = divergence_token_loss(DistillLoss(), teacher, 1.0)
    shifted = replace(make_batch(), teacher_hidden=hidden.detach().roll(1, 0))
    assert chunked_loss(hidden, head, shifted, token_loss, 4)[0] > N * 0.1


@everyone
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e10])
def test_garbage_at_uncounted_positions_stays_out_of_loss_and_gradient(settings: dict[str, Any], garbage: float) -> None:
    hidden, head, teacher = student_and_teacher()
    token_loss, batch = divergence_token_loss(DistillLoss(**settings), teacher, 1.0), make_batch()
    weights = (torch.arange(N) % 4 != 1).float()
    leaves = (hidden, head.weight, head.bias)
    expected, expected_sums = chunked_loss(hidden, head, batch, token_loss, 4, weights)
    gradients = torch.autograd.grad(expected, leaves)
    out = weights == 0
    with torch.no_grad():
        hidden[out] = garbage
    batch = replace(
        batch,
        teacher_hidden=torch.where(out[:, None], garbage, batch.teacher_hidden),
        rollout_logprobs_raw=torch.where(out, garbage, batch.rollout_logprobs_raw),
    )
    loss, sums = chunked_loss(hidden, head, batch, token_loss, 4, weights)
    assert torch.equal(loss, expected)
    assert sums == expected_sums
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, leaves), gradients, strict=True))


def test_cross_entropy_counts_given_responses_at_temperature_one() -> None:
    hidden, head, teacher = student_and_teacher()
    batch = make_batch()
    given = ~batch.on_policy
    plain = DistillLoss(divergence="forward_kl")
    mixed = plain.model_copy(update={"cross_entropy": 0.3})
    without, _ = chunked_loss(hidden, head, batch, divergence_token_loss(plain, teacher, 2.0), 4)
    with_it, sums = chunked_loss(hidden, head, batch, divergence_token_loss(mixed, teacher, 2.0), 4)
    total = F.cross_entropy(head.logits(hidden)[given], batch.targets[given], reduction="sum")
    assert (with_it - without).item() == pytest.approx(0.3 * total.item(), rel=1e-4)
    assert metric(sums, "cross_entropy") == pytest.approx(total.item(), rel=1e-5)
    assert metric(sums, "divergence") == pytest.approx(without.item(), rel=1e-6)


def test_clips_are_two_things_and_their_share_is_reported() -> None:
    hidden, head, teacher = student_and_teacher()
    batch = make_batch()
    log_t, log_s = teacher.logits(batch.teacher_hidden).log_softmax(-1), head.logits(hidden).log_softmax(-1).detach()
    terms = log_t.exp() * (log_t - log_s)
    cap = terms.sum(-1).median().item()
    for settings, expected, clipped in (
        ({"clip_element": 0.05}, terms.clamp(max=0.05).sum(-1), (terms > 0.05).any(-1)),
        ({"clip_token": cap}, terms.sum(-1).clamp(max=cap), terms.sum(-1) > cap + 1e-5),
    ):
        loss = DistillLoss(divergence="forward_kl", **settings)
        given, sums = chunked_loss(hidden, head, batch, divergence_token_loss(loss, teacher, 1.0), 4)
        assert given.item() == pytest.approx(expected.sum().item(), rel=1e-5)
        assert metric(sums, "clipped") == clipped.sum() > 0


def test_metrics_are_what_their_names_say() -> None:
    hidden, head, teacher = student_and_teacher()
    batch = make_batch()
    loss = DistillLoss(divergence="reverse_kl", top_k=3, support="student")
    _, sums = chunked_loss(hidden, head, batch, divergence_token_loss(loss, teacher, 1.0), 4)
    t, s = teacher.logits(batch.teacher_hidden).softmax(-1), head.logits(hidden).softmax(-1).detach()
    rows, support = torch.arange(N), s.topk(3).indices
    expected = {
        "teacher_entropy": -(t * t.log()).sum(),
        "student_entropy": -(s * s.log()).sum(),
        "top1_agreement": (t.argmax(-1) == s.argmax(-1)).sum(),
        "teacher_logprob": t[rows, batch.targets].log().sum(),
        "student_logprob": s[rows, batch.targets].log().sum(),
        "teacher_support_mass": t.gather(1, support).sum(),
        "student_support_mass": s.gather(1, support).sum(),
    }
    assert {name: metric(sums, name) for name in expected} == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-4)
    _, sums = chunked_loss(hidden, head, batch, cross_entropy_token_loss(), 4)
    assert metric(sums, "accuracy") == (s.argmax(-1) == batch.targets).sum()
    assert metric(sums, "entropy") == pytest.approx(float(expected["student_entropy"]), rel=1e-5)


def test_the_loss_of_first_tokens_is_reported_apart() -> None:
    """Three responses of 4, 1 and 8 tokens: the mean over their first tokens, however they are chunked."""
    hidden, head, teacher = student_and_teacher()
    lengths = torch.tensor([4, 1, 8])
    index = torch.cat([torch.arange(n) for n in lengths.tolist()])
    batch = replace(make_batch(), response_index=index, sequence_index=torch.repeat_interleave(torch.arange(3), lengths))
    token_loss = divergence_token_loss(DistillLoss(divergence="forward_kl"), teacher, 1.0)
    plain, _ = chunked_loss(hidden, head, batch, token_loss, 3)
    loss, sums = chunked_loss(hidden, head, batch, with_first_token(token_loss), 3)
    per_token, _ = token_loss(head.logits(hidden), batch)
    assert torch.equal(loss, plain)
    assert metric(sums, "first_token") == 3
    assert metric(sums, "first_token_loss") == pytest.approx(per_token[[0, 4, 5]].sum().item(), rel=1e-5)


def test_sampled_token_uses_the_rollouts_untruncated_log_probs_where_there_are_any() -> None:
    hidden, head, teacher = student_and_teacher()
    batch = make_batch()
    token_loss = divergence_token_loss(DistillLoss(divergence="sampled_token"), teacher, 1.0)
    rows = torch.arange(N)
    lp_t = teacher.logits(batch.teacher_hidden).log_softmax(-1)[rows, batch.targets]
    lp_s = head.logits(hidden).log_softmax(-1)[rows, batch.targets].detach()
    off_policy, _ = chunked_loss(hidden, head, batch, token_loss, 4)
    expected = -(lp_t - lp_s) * (lp_s - batch.rollout_logprobs_raw).exp()
    assert off_policy.item() == pytest.approx(expected.sum().item(), rel=1e-4)
    on_policy, _ = chunked_loss(hidden, head, replace(batch, rollout_logprobs_raw=None), token_loss, 4)
    assert on_policy.item() == pytest.approx((lp_s - lp_t).sum().item(), rel=1e-4)


def test_the_teacher_gets_no_gradient() -> None:
    hidden, head, teacher = student_and_teacher()
    teacher.weight.requires_grad_()
    batch = make_batch()
    batch.teacher_hidden.requires_grad_()
    chunked_loss(hidden, head, batch, divergence_token_loss(DistillLoss(), teacher, 1.0), 4)[0].backward()
    assert teacher.weight.grad is None
    assert batch.teacher_hidden.grad is None
    assert hidden.grad is not None


def test_a_missing_field_is_named_with_a_remedy() -> None:
    hidden, head, teacher = student_and_teacher()
    for field, loss in (("teacher_hidden", DistillLoss()), ("on_policy", DistillLoss(cross_entropy=0.1))):
        batch = replace(make_batch(), **{field: None})
        with pytest.raises(ValueError, match=rf"batch\.{field} is None .*; "):
            chunked_loss(hidden, head, batch, divergence_token_loss(loss, teacher, 1.0), 4)


def test_every_named_divergence_of_the_config_is_built() -> None:
    names = DistillLoss.model_fields["divergence"].annotation.__args__
    assert set(names) == {settings["divergence"] for settings in EVERY.values()}
    assert all(hasattr(divergence, name) for name in names)


@pytest.mark.parametrize(
    "settings", [{"ratio_clip": 0.2}, {"divergence": "sampled_token", "clip_element": 0.1}, {"divergence": "jsd", "top_k": 4}]
)
def test_a_setting_that_the_divergence_would_ignore_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="with divergence="):
        DistillLoss(**settings)


FUSED = {
    "forward_kl": {"divergence": "forward_kl"},
    "reverse_kl": {"divergence": "reverse_kl"},
    "jsd at its ends": {"divergence": "jsd", "beta": 1.0},
    "clip_token": {"divergence": "reverse_kl", "clip_token": 0.5},
    "with cross-entropy": {"divergence": "forward_kl", "cross_entropy": 0.3},
    "cross_entropy": None,
}


@pytest.mark.parametrize("march", BUILDS.values(), ids=BUILDS)
@pytest.mark.parametrize("vocab", [37, 700])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("settings", FUSED.values(), ids=FUSED)
def test_the_kernels_losses_are_the_plain_ones(
    settings: dict[str, Any] | None, temperature: float, vocab: int, march: str
) -> None:
    """Values, gradients and metrics, also where a logit rules its token out for both models, or the student's for itself."""
    try:
        kernels = cpu_kernels(march)
    except BuildError as error:
        pytest.skip(str(error))
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(N, vocab + 3, generator=generator)
    teacher = Head(torch.randn(vocab, 6, generator=generator))
    batch = make_batch(vocab=vocab)
    logits[2, batch.targets[2] - 1] = -math.inf
    found = []
    for backend in (REFERENCE, kernels):
        if settings is None:
            token_loss = cross_entropy_token_loss(temperature, backend)
        else:
            token_loss = divergence_token_loss(DistillLoss(**settings), teacher, temperature, backend)
        z = logits.double().float().requires_grad_()
        per_token, metrics = token_loss(z, batch)
        (grad,) = torch.autograd.grad(per_token, z, torch.linspace(-1, 2, N))
        found.append({"loss": per_token.detach(), "gradient": grad, **metrics})
    want, got = found
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], rtol=2e-6, atol=1e-5, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
        )
    same = divergence_token_loss(DistillLoss(**(settings or FUSED["reverse_kl"])), Head(torch.eye(vocab)), temperature, kernels)
    z = logits[3:4, :vocab].clone().requires_grad_()
    one = replace(batch.select(3, 4), teacher_hidden=z.detach(), on_policy=torch.tensor([True]))
    per_token, _ = same(z, one)
    assert per_token.item() == 0
    assert not torch.autograd.grad(per_token.sum(), z)[0].any()


NEVER_NEGATIVE = {name: s for name, s in EVERY.items() if "sampled_token" not in name and name != "clip_element"}


@pytest.mark.parametrize("march", [None, "native"])
@pytest.mark.parametrize("settings", NEVER_NEGATIVE.values(), ids=NEVER_NEGATIVE)
def test_no_divergence_of_bf16_models_with_large_logits_is_negative(settings: dict[str, Any], march: str | None) -> None:
    """Logits of 60 over 32,768 ids from bf16 hidden states and heads; teachers that are the student, near it and far away."""
    try:
        kernels = REFERENCE if march is None else cpu_kernels(march)
    except BuildError as error:
        pytest.skip(str(error))
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(N, H, generator=generator), torch.randn(32768, H, generator=generator)
    head = Head((weight * (60 / (hidden @ weight.T).abs().max())).bfloat16())
    batch = make_batch(vocab=32768)
    for noise in (0.0, 2**-8, 1.0):
        teacher_hidden = (hidden + noise * torch.randn(N, H, generator=generator)).bfloat16()
        token_loss = divergence_token_loss(DistillLoss(**settings), head, 1.0, kernels)
        logits = head.logits(hidden.bfloat16()).requires_grad_()
        _, metrics = token_loss(logits, replace(batch, teacher_hidden=teacher_hidden))
        assert 55 < logits.abs().max() < 65
        assert metrics["divergence"].min() >= -1e-6
        assert noise == 0 or metrics["divergence"].max() > 1e-6


def test_the_kernels_gradient_is_taken_once_and_a_target_outside_is_refused() -> None:
    kernels = get_kernels("auto", "cpu", torch.float32)
    if kernels.token_loss is None:
        pytest.skip("no compiled kernels here")
    z, batch = torch.randn(N, 37, requires_grad=True), make_batch()
    per_token, _ = cross_entropy_token_loss(1.0, kernels)(z, batch)
    per_token.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        per_token.sum().backward()
    with pytest.raises(ValueError, match=r"targets .*allowed"):
        cross_entropy_token_loss(1.0, kernels)(z[:, :5], batch)
