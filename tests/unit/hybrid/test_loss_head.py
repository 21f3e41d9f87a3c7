"""The chunked loss head against the plain loss: values, gradients, masks, memory, and as the forward of an FSDP head module."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from paged import ModuleSource
from pool import Pool
from tiny import tiny_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid import loss_head
from hybrid.batch import Batch
from hybrid.config import HybridConfig
from hybrid.loss_head import chunked_loss, head_logits, pack_head, tokens_per_chunk
from hybrid.mesh import open_mesh
from inference_v2.head import Head
from inference_v2.kernels import get_kernels
from inference_v2.models import spec_of
from inference_v2.weights import FusedWeights

N, H, V = 13, 8, 40


def cross_entropy(logits: Tensor, chunk: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    loss = F.cross_entropy(logits, chunk.targets, reduction="none")
    return loss, {"hits": logits.argmax(-1) == chunk.targets, "nll": loss.detach()}


def batch_of(n: int, vocab: int = V, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (n + 1,), generator=generator)
    index = torch.arange(n)
    return Batch(ids, torch.arange(n + 1), torch.tensor([0, n + 1]), index, ids[1:], torch.zeros(n, dtype=torch.long))


def leaves(dtype: torch.dtype = torch.float32, n: int = N, h: int = H, v: int = V, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((n, h), (v, h), (v,))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


HEADS: dict[str, Callable[[Tensor, Tensor], Head]] = {
    "plain": lambda w, b: Head(w),
    "bias": lambda w, b: Head(w, b),
    "cut vocabulary": lambda w, b: Head(w, b, vocab_limit=37),
    "scale": lambda w, b: Head(w, b, scale=0.3),
    "softcap": lambda w, b: Head(w, b, vocab_limit=37, scale=1.7, softcap=3.0),
}
heads = pytest.mark.parametrize("kind", HEADS)


def assert_near(given: Tensor, expected: Tensor, tolerance: float) -> None:
    """The contract's measure: relative to the largest element."""
    assert given.dtype == expected.dtype
    gap = (given.float() - expected.float()).abs().max()
    assert gap <= tolerance * expected.float().abs().max(), f"{gap} of {expected.abs().max()}"


def plain_loss(hidden: Tensor, head: Head, batch: Batch, weights: Tensor | None = None) -> Tensor:
    per_token = cross_entropy(head.logits(hidden), batch)[0]
    return (per_token if weights is None else per_token * weights).sum()


@heads
@pytest.mark.parametrize("chunk_tokens", [1, 4, N, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_the_plain_loss(kind: str, chunk_tokens: int, dtype: torch.dtype, tolerance: float, weighted: bool) -> None:
    tensors, batch = leaves(dtype), batch_of(N, 37)
    head = HEADS[kind](*tensors[1:])
    weights = torch.linspace(0.1, 2.0, N) if weighted else None
    loss, sums = chunked_loss(tensors[0], head, batch, cross_entropy, chunk_tokens, weights)
    # the bf16 reference is the same arithmetic in fp32 on the same bf16 values
    exact = [t.detach().float().requires_grad_() for t in tensors]
    reference = plain_loss(exact[0], HEADS[kind](*exact[1:]), batch, weights)
    assert loss.dtype == torch.float32
    assert_near(loss.detach(), reference.detach(), 2e-6)
    used = 2 if kind == "plain" else 3
    gradients = torch.autograd.grad(loss / 7, tensors[:used])
    for given, expected in zip(gradients, torch.autograd.grad(reference / 7, exact[:used]), strict=True):
        assert_near(given, expected.to(dtype), tolerance)
    logits = head.logits(tensors[0]).detach()
    assert sums["hits"] == (logits.argmax(-1) == batch.targets).sum()
    assert sums["nll"].item() == pytest.approx(plain_loss(exact[0], HEADS[kind](*exact[1:]), batch).item(), rel=1e-5)


def test_rows_beyond_the_vocabulary_limit_get_no_gradient() -> None:
    hidden, weight, bias = leaves()
    chunked_loss(hidden, Head(weight, bias, vocab_limit=30), batch_of(N, 30), cross_entropy, 4)[0].backward()
    assert (weight.grad[30:] == 0).all()
    assert (bias.grad[30:] == 0).all()
    assert (weight.grad[:30] != 0).all()


def test_the_heads_gradient_accumulates_in_fp32_over_chunks() -> None:
    """512 chunks of one equal row each: adding in bf16 would stop growing at 256 of them."""
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    batch = replace(batch_of(512), targets=torch.zeros(512, dtype=torch.long))
    chunked_loss(torch.ones(512, 1, dtype=torch.bfloat16), Head(weight), batch, cross_entropy, 1)[0].backward()
    assert weight.grad.flatten().tolist() == [-256.0, 256.0]


def test_a_lower_precision_head_is_converted_by_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, bias = leaves(torch.bfloat16)
    head = Head(weight, bias, vocab_limit=37, scale=0.5, softcap=4.0)
    whole = chunked_loss(hidden, head, batch_of(N, 37), cross_entropy, 4)[0]
    expected = torch.autograd.grad(whole, (hidden, weight, bias))
    monkeypatch.setattr(loss_head, "CONVERTED_BYTES", 4 * H * 5)  # five rows at a time
    with LiveBytes() as memory:
        assert_near(head_logits(head, hidden), head.logits(hidden).detach(), 1e-6)
    assert memory.largest <= 4 * 40 * N
    blocked = chunked_loss(hidden, head, batch_of(N, 37), cross_entropy, 4)[0]
    for given, wanted in zip(torch.autograd.grad(blocked, (hidden, weight, bias)), expected, strict=True):
        assert_near(given, wanted, 1e-2)
    assert_near(blocked.detach(), whole.detach(), 1e-6)


def test_fp32_logits_are_bit_equal_to_the_heads() -> None:
    hidden, weight, bias = leaves()
    head = Head(weight, bias, vocab_limit=37, scale=0.5, softcap=4.0)
    assert torch.equal(head_logits(head, hidden), head.logits(hidden))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rollout_and_trainer_give_equal_hidden_states_bit_equal_logits(dtype: torch.dtype, tied: bool) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    weights = FusedWeights(spec_of(model.config), dtype, "cpu", vocab_limit=79)
    weights.refresh(ModuleSource(model), version=0)
    hidden = leaves(h=64)[0].detach().to(dtype)
    trainer = Head(model.get_output_embeddings().weight.detach().to(dtype), vocab_limit=79)
    with weights.final() as final:
        assert torch.equal(head_logits(trainer, hidden), final.head.logits(hidden))


def test_a_large_head_is_packed_in_blocks_with_the_bits_of_a_whole_one(monkeypatch) -> None:
    kernels = get_kernels("auto", "cpu", torch.bfloat16)
    hidden, weight, _ = (leaf.detach().bfloat16() for leaf in leaves())
    whole = pack_head(Head(weight, vocab_limit=37), kernels)
    monkeypatch.setattr(loss_head, "HELD_BYTES", 0)
    monkeypatch.setattr(loss_head, "PACKED_BYTES", 7 * weight.shape[1] * 2)
    assert torch.equal(pack_head(Head(weight, vocab_limit=37), kernels).logits(hidden), whole.logits(hidden))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, -1e10])
def test_positions_of_weight_zero_add_nothing_whatever_they_hold(garbage: float) -> None:
    tensors = leaves()
    weights = torch.ones(N)
    weights[[2, 3, 9]] = 0
    keep = weights != 0
    kept = [tensors[0].detach()[keep].requires_grad_(), *(t.detach().clone().requires_grad_() for t in tensors[1:])]
    batch = replace(batch_of(N), rollout_logprobs=torch.where(keep, 0.5, garbage))
    batch_kept = replace(batch_of(int(keep.sum())), targets=batch.targets[keep], rollout_logprobs=torch.full((10,), 0.5))
    with torch.no_grad():
        tensors[0][~keep] = garbage

    def token_loss(logits: Tensor, chunk: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = cross_entropy(logits, chunk)
        return loss * chunk.rollout_logprobs, metrics

    loss, sums = chunked_loss(tensors[0], Head(*tensors[1:]), batch, token_loss, 4, weights)
    expected, expected_sums = chunked_loss(kept[0], Head(*kept[1:]), batch_kept, token_loss, 4)
    assert_near(loss.detach(), expected.detach(), 1e-6)
    assert {k: v.item() for k, v in sums.items()} == pytest.approx({k: v.item() for k, v in expected_sums.items()}, rel=1e-6)
    of_hidden, *of_head = torch.autograd.grad(loss, tensors)
    expected_of_hidden, *expected_of_head = torch.autograd.grad(expected, kept)
    assert (of_hidden[~keep] == 0).all()
    assert_near(of_hidden[keep], expected_of_hidden, 1e-6)
    for given, wanted in zip(of_head, expected_of_head, strict=True):
        assert_near(given, wanted, 1e-6)


def test_no_position_gives_zero_with_the_graph_attached() -> None:
    tensors = leaves()
    hidden = tensors[0][:0]
    loss, sums = chunked_loss(hidden, Head(*tensors[1:]), batch_of(0), cross_entropy, 4)
    loss.backward()
    assert loss.item() == 0
    assert sums == {}
    assert all((t.grad == 0).all() for t in tensors)


def test_without_grad_nothing_is_differentiated() -> None:
    hidden, weight, bias = leaves()

    def token_loss(logits: Tensor, chunk: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        assert not logits.requires_grad
        return cross_entropy(logits, chunk)

    with torch.no_grad():
        loss, _ = chunked_loss(hidden, Head(weight, bias), batch_of(N), token_loss, 4)
    assert not loss.requires_grad
    assert_near(loss, plain_loss(hidden, Head(weight, bias), batch_of(N)).detach(), 2e-6)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_leaves_get_no_gradient_and_the_others_do(frozen: int) -> None:
    tensors = leaves()
    tensors[frozen].requires_grad_(False)
    chunked_loss(tensors[0], Head(*tensors[1:]), batch_of(N), cross_entropy, 4)[0].backward()
    assert [t.grad is None for t in tensors] == [i == frozen for i in range(3)]


def test_autocast_does_not_lower_the_product() -> None:
    hidden, weight, bias = leaves()
    expected, _ = chunked_loss(hidden, Head(weight, bias), batch_of(N), cross_entropy, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = chunked_loss(hidden, Head(weight, bias), batch_of(N), cross_entropy, 4)
    assert torch.equal(loss, expected)


def test_second_backward_is_refused() -> None:
    hidden, weight, _ = leaves()
    loss, _ = chunked_loss(hidden, Head(weight), batch_of(N), cross_entropy, 4)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_mistakes_at_the_door_are_named() -> None:
    hidden, weight, _ = leaves()
    for bad in ({"hidden": hidden[1:]}, {"weights": torch.ones(N - 1)}, {"chunk_tokens": 0}):
        arguments = {"hidden": hidden, "chunk_tokens": 4, "weights": None} | bad
        with pytest.raises(ValueError, match=r"targets|chunk_tokens"):
            chunked_loss(head=Head(weight), batch=batch_of(N), token_loss=cross_entropy, **arguments)


# --- memory ---


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made under it: the peak alive at once and the largest single one. No clock, no allocator."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        old = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = function(*args, **(kwargs or {}))
        for tensor in (t for t in tree_leaves(out) if isinstance(t, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata in old or storage._cdata in self._seen:
                continue
            self._seen.add(storage._cdata)
            self.live += storage.nbytes()
            self.peak, self.largest = max(self.peak, self.live), max(self.largest, storage.nbytes())
            weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return out

    def _free(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.live -= nbytes


def memory_of(n: int, vocab: int, chunk_tokens: int, plain: bool = False) -> LiveBytes:
    hidden, weight, bias = leaves(n=n, h=16, v=vocab)
    head, batch = Head(weight, bias), batch_of(n)
    with LiveBytes() as memory:
        if plain:
            loss = plain_loss(hidden, head, batch)
        else:
            loss, _ = chunked_loss(hidden, head, batch, cross_entropy, chunk_tokens)
        loss.backward()
    return memory


def test_memory_counter_sees_the_plain_losss_logits() -> None:
    assert memory_of(64, 3000, 8, plain=True).largest == 64 * 3000 * 4
    assert memory_of(64, 3000, 8, plain=True).peak > 2 * 64 * 3000 * 4


def test_peak_memory_is_the_gradients_and_a_few_chunks_of_logits() -> None:
    vocab, h = 3000, 16
    for n in (64, 512):
        for chunk_tokens in (4, 16):
            memory = memory_of(n, vocab, chunk_tokens)
            gradients = 4 * (n * h + vocab * h + vocab)
            assert memory.peak <= gradients + 4 * (4 * chunk_tokens * vocab + 6 * n + 1000)
            assert memory.largest <= max(4 * n * h, 4 * vocab * h, 4 * chunk_tokens * vocab)


def test_peak_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    growth = memory_of(512, 3000, 8).peak - memory_of(64, 3000, 8).peak
    assert growth <= 4 * (512 - 64) * (16 + 6)  # the hidden states' gradient and a few numbers per token


def test_a_lower_precision_head_is_never_converted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_head, "CONVERTED_BYTES", 4 * 16 * 100)
    vocab, n = 3000, 64
    hidden, weight, bias = leaves(torch.bfloat16, n, 16, vocab)
    weight.requires_grad_(False)
    with LiveBytes() as memory:
        chunked_loss(hidden, Head(weight, bias), batch_of(n), cross_entropy, 8)
    assert memory.largest <= 4 * 8 * vocab < 4 * vocab * 16


# --- under FSDP2 ---


class LossHeadModule(nn.Linear):
    """A language-model head whose forward is the loss, as the engine patches it."""

    def forward(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return chunked_loss(hidden, Head(self.weight, self.bias, vocab_limit=37), batch, cross_entropy, 4)


class TinyModel(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(V, H), nn.Linear(H, H), LossHeadModule(H, V)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.head(self.body(self.embed(batch.token_ids))[batch.loss_index], batch)


def gradients_of(model: nn.Module, batches: list[Batch]) -> dict[str, Tensor]:
    for batch in batches:
        model(batch)[0].backward()
    full = {name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in model.named_parameters()}
    return full


def sharded_gradients_match(tied: bool, dtype: torch.dtype) -> None:
    """On every rank: the sum over ranks of the sharded model's gradients is the unsharded model's over all batches; the last
    rank has nothing in its second micro-batch."""
    mesh = open_mesh(HybridConfig(device="cpu"))
    rank, world = mesh.rank, mesh.world_size
    batches = [[batch_of(5 + 3 * r, 37, seed=r), batch_of(0 if r == world - 1 else 4, 37, seed=9 + r)] for r in range(world)]
    torch.manual_seed(0)
    plain, model = TinyModel(tied), TinyModel(tied)
    model.load_state_dict(plain.state_dict())
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if not tied:
        fully_shard(model.head, mesh=mesh.device_mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh.device_mesh, mp_policy=policy)
    for module in (model,) if tied else (model, model.head):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    given = gradients_of(model, batches[rank])
    if dtype == torch.bfloat16:
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.copy_(parameter.bfloat16())
    expected = gradients_of(plain, [b for of_rank in batches for b in of_rank])
    for name, gradient in given.items():
        assert_near(gradient, expected[name], 2e-6 if dtype == torch.float32 else 1e-2)


tyings = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@tyings
@dtypes
def test_gradients_under_fsdp_on_one_rank(tied: bool, dtype: torch.dtype) -> None:
    sharded_gradients_match(tied, dtype)


@tyings
@dtypes
def test_gradients_under_fsdp_on_two_ranks(pool2: Pool, tied: bool, dtype: torch.dtype) -> None:
    pool2.run(sharded_gradients_match, tied, dtype)


def test_chunks_shrink_as_the_vocabulary_grows():
    narrow, wide = (Head(torch.zeros(rows, 2)) for rows in (49_152, 151_936))
    assert tokens_per_chunk(narrow, None) == 256
    assert tokens_per_chunk(wide, None) == 82
    assert tokens_per_chunk(wide, 7) == 7


@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_a_gradient_is_narrowed_in_its_own_memory(monkeypatch, at_once: int) -> None:
    monkeypatch.setattr(loss_head, "NARROWED_AT_ONCE", at_once)
    wide = torch.randn(13, 9, generator=torch.Generator().manual_seed(0))
    want, memory = wide.to(torch.bfloat16), wide.data_ptr()
    got = loss_head._narrowed(wide, torch.bfloat16)
    assert torch.equal(got, want)
    assert got.data_ptr() == memory
