"""Training with the rollout's kernels: its gradients are the module's own, and rollout and training agree to the bit."""

from __future__ import annotations

import pytest
import torch
from cpu_builds import BUILDS
from hybrid_cases import cross_entropy, full_gradients, make_engine, pack, ragged_sequences, relative_error
from tiny import FAMILIES, save_tiny
from torch import Tensor, nn

from inference_v2 import SamplingParams
from inference_v2.kernels.cpu import BuildError, CpuKernels, load_kernels

SEQUENCES = ragged_sequences(7, seed=3)


@pytest.fixture(params=BUILDS.values(), ids=BUILDS)
def kernels(request) -> CpuKernels:
    try:
        return load_kernels(request.param)
    except BuildError as error:
        pytest.skip(str(error))


def near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    allowed = 2e-6 if dtype == torch.float32 else 1e-2
    assert got.dtype == dtype
    assert relative_error(got.double(), want) <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "dim"), [(1, 8), (70, 64), (33, 100), (40, 2048)])
def test_the_norms_backward_is_the_formulas(kernels, rows, dim, dtype):
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(rows, dim, generator=generator).to(dtype) for _ in range(2))
    weight = (1 + 0.2 * torch.randn(dim, generator=generator)).to(dtype)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    normed = exact[0] * torch.rsqrt(exact[0].pow(2).mean(-1, keepdim=True) + 1e-5) * exact[1]
    want = torch.autograd.grad(normed, exact, dy.double())
    dx, d_weight = kernels.rms_norm_backward(x, weight, dy, 1e-5)
    near(dx, want[0], dtype)
    near(d_weight.to(dtype), want[1], dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        again = kernels.rms_norm_backward(x, weight, dy, 1e-5)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(again[0], dx)
    assert torch.equal(again[1], d_weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "dim"), [(1, 8), (9, 100), (300, 512)])
def test_the_activations_backward_is_the_formulas_also_where_rows_lie_apart(kernels, rows, dim, dtype):
    generator = torch.Generator().manual_seed(0)
    both = (4 * torch.randn(rows, 2 * dim, generator=generator)).to(dtype)
    dy = torch.randn(rows, dim, generator=generator).to(dtype)
    gate, up = both.chunk(2, dim=-1)
    exact = [t.double().requires_grad_() for t in (gate, up)]
    want = torch.autograd.grad(nn.functional.silu(exact[0]) * exact[1], exact, dy.double())
    for got, expected in zip(kernels.silu_mul_backward(gate, up, dy), want, strict=True):
        near(got, expected, dtype)
    near(kernels.silu_mul(gate, up), (nn.functional.silu(exact[0]) * exact[1]).detach(), dtype)
    with pytest.raises(ValueError, match="rows of one shape and dtype"):
        kernels.silu_mul(gate, up[:, :-1])


def gradients(path: str, **config: object) -> dict[str, Tensor]:
    engine = make_engine(path, **config)
    engine.forward_backward([pack(SEQUENCES[:4]), pack(SEQUENCES[4:])], cross_entropy)
    return full_gradients(engine)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_modules_own_layers(tmp_path, family, compute_dtype):
    """In bf16: as near to the fp32 gradient as the module's own are, up to half as much again."""
    save_tiny(tmp_path, family)
    exact = gradients(str(tmp_path), fused_layers=False)
    fused = gradients(str(tmp_path), compute_dtype=compute_dtype)
    assert fused.keys() == exact.keys()
    if compute_dtype == "float32":
        for name, gradient in fused.items():
            assert relative_error(gradient, exact[name]) <= 1e-5, name
        return
    own = gradients(str(tmp_path), compute_dtype=compute_dtype, fused_layers=False)
    noise, given = (sum(float((g[n] - exact[n]).norm() ** 2) for n in exact) ** 0.5 for g in (own, fused))
    assert 0 < given <= 1.5 * noise


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_rounds_as_the_rollout_does(tmp_path, family, compute_dtype):
    """Bit for bit: with batch_invariant no token's hidden state depends on what came with it."""
    save_tiny(tmp_path, family)
    engine = make_engine(str(tmp_path), compute_dtype=compute_dtype, rollout={"engine": {"batch_invariant": True}})
    sampling = SamplingParams(max_new_tokens=12, temperature=1.0, seed=1, ignore_eos=True)
    prompts = [s[:3] for s in SEQUENCES if len(s) >= 3]
    done = [c for (c,) in engine.generate(prompts, sampling)]
    whole = [[*prompt, *c.token_ids] for prompt, c in zip(prompts, done, strict=True)]
    hidden = engine.model.hidden_states(pack(whole, counted_from=3)).split([12] * len(whole))
    scored = engine.score_sequences(whole, starts=[3] * len(whole), logprobs=False, hidden=True)
    for mine, theirs in zip(hidden, scored, strict=True):
        assert torch.equal(mine, theirs.hidden)
    logprobs = engine.model.token_logprobs(pack(whole, counted_from=3))
    rollout = torch.tensor([v for c in done for v in c.logprobs_raw])
    assert (logprobs - rollout).abs().max() <= 2e-6  # the sums over the vocabulary are ordered otherwise


@pytest.mark.parametrize(
    ("config", "fused"),
    [({}, True), ({"fused_layers": False}, False), ({"rollout": {"engine": {"kernels": "reference"}}}, False)],
    ids=["auto", "off", "reference"],
)
def test_the_layers_are_the_modules_own_where_the_rollouts_kernels_are_not_wanted(tmp_path, config, fused):
    save_tiny(tmp_path, "llama")
    modules = make_engine(str(tmp_path), **config).model.module.layers[0].modules()
    replaced = {type(m).__name__ for m in modules if "forward" in vars(m)}
    assert replaced == ({"LlamaRMSNorm", "LlamaMLP", "Linear"} if fused else set())
