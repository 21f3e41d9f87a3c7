"""From a folder or a module in memory to shards: what is loaded, what is frozen, what is refused."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from hybrid_cases import (
    bytes_of,
    cross_entropy,
    full_gradients,
    full_weights,
    hf_module,
    live_bytes,
    make_engine,
    pack,
    ragged_sequences,
    relative_error,
)
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, save_tiny, tiny_model
from torch import nn

from hybrid import HybridEngine
from hybrid.config import HybridConfig
from hybrid.mesh import open_mesh
from hybrid.models import ShardedModel
from hybrid.sharding import gathered
from inference_v2.loading import FolderSource

SEQUENCES = ragged_sequences(5)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip


def _model(path, config: dict | None = None, **options) -> ShardedModel:
    settings = HybridConfig(**(config or {}))
    return ShardedModel.from_pretrained(str(path), settings, open_mesh(settings), **options)


def _hf_logprobs(hf: nn.Module, vocab_limit: int) -> torch.Tensor:
    parts = []
    for sequence in SEQUENCES:
        ids = torch.tensor([sequence])
        logprobs = hf(ids).logits[0, :-1, :vocab_limit].float().log_softmax(-1)
        parts.append(logprobs.gather(1, ids[0, 1:, None]).squeeze(1))
    return torch.cat(parts)


def scores(path: str, config: dict) -> torch.Tensor:
    return _model(path, config).token_logprobs(pack(SEQUENCES)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_sharded_model_scores_as_hf_does(pool2, tmp_path, family):
    rope = {} if family == "qwen2" else {"rope_parameters": LLAMA3}  # theta and factors must reach the recomputed buffers
    hf = save_tiny(tmp_path, family, tie_word_embeddings=family in ("qwen2", "exaone4_5"), max_shard_size="40KB", **rope)
    expected = _hf_logprobs(hf, 79)
    for given in pool2.run(scores, str(tmp_path), {}):
        assert (torch.tensor(given) - expected).abs().max() < 1e-5


@torch.no_grad()
def test_in_bf16_a_sharded_model_scores_as_hf_in_bf16_does(tmp_path):
    """Also the frequencies, which a cast to bf16 would ruin."""
    hf = save_tiny(tmp_path, "llama", rope_parameters=LLAMA3).to(torch.float32)
    half = tiny_model("llama", dtype=torch.bfloat16, rope_parameters=LLAMA3)
    noise = (_hf_logprobs(half, 79) - _hf_logprobs(hf, 79)).abs().mean()
    given = _model(tmp_path, {"compute_dtype": "bfloat16"}).token_logprobs(pack(SEQUENCES))
    assert (given - _hf_logprobs(hf, 79)).abs().mean() <= 1.5 * noise
    assert (given - _hf_logprobs(half, 79)).abs().mean() <= 1.5 * noise


def test_masters_are_fp32_and_gathered_weights_bf16(tmp_path):
    save_tiny(tmp_path, "llama", dtype=torch.bfloat16)
    engine = make_engine(str(tmp_path), compute_dtype="bfloat16", optimizer={"name": "adamw", "lr": 1e-3})
    engine.forward_backward([pack(SEQUENCES)], cross_entropy)
    parameters = engine.model.parameters()
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    assert {p.grad.dtype for p in parameters.values()} == {torch.float32}
    engine.optim_step()
    assert {t.dtype for state in engine.optimizer.state.values() for t in state.values()} == {torch.float32}
    source = engine.model.source()
    with source.scope(""):
        assert source.get("lm_head.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("change", ["missing", "surplus"])
def test_names_that_do_not_fit_are_listed(tmp_path, change):
    save_tiny(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    if change == "missing":
        del weights["model.layers.1.mlp.up_proj.weight"]
    else:
        weights["model.layers.1.mlp.gone.weight"] = torch.zeros(2)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{change}: .*model\.layers\.1\.mlp"):
        _model(tmp_path)


def refusal(path: str) -> str:
    try:
        _model(path)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rows", [90, 100])
def test_a_tensor_of_another_shape_is_refused_on_every_rank(pool2, tmp_path, rows):
    save_tiny(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    for line in pool2.run(refusal, str(tmp_path)):
        assert line.startswith("model.embed_tokens.weight: ")


def test_an_unknown_architecture_without_decoder_layers_is_refused():
    class Nothing(nn.Module):
        _no_split_modules = None

        def get_decoder(self):
            return nn.Linear(2, 2)

    from hybrid.policy import PolicyModule

    with pytest.raises(ValueError, match="no decoder layers"):
        PolicyModule.layers.fget(type("Holder", (), {"hf": Nothing()})())


# -- frozen parts


def train_frozen(path: str) -> dict:
    engine = make_engine(path, freeze=["embed_tokens", r"layers\.0\."], activation_checkpointing=True)
    before = full_weights(engine)
    for _ in range(2):
        engine.forward_backward([pack(SEQUENCES)], cross_entropy)
        engine.optim_step()
    moved = [n for n, w in full_weights(engine).items() if not torch.equal(w, before[n])]
    return {"moved": moved, "all": list(before)}


def test_frozen_parameters_stay_bit_equal_and_all_others_move(pool2, tmp_path):
    save_tiny(tmp_path, "llama")
    for result in pool2.run(train_frozen, str(tmp_path)):
        frozen = [n for n in result["all"] if re.search(r"embed_tokens|layers\.0\.", n)]
        assert set(result["moved"]) == set(result["all"]) - set(frozen)


def test_a_model_with_nothing_to_train_is_refused(tmp_path):
    save_tiny(tmp_path, "llama")
    with pytest.raises(ValueError, match="every parameter is frozen"):
        make_engine(str(tmp_path), freeze=["."])


def vision_tower(path: str) -> dict:
    engine = make_engine(path, optimizer={"name": "adamw", "lr": 1e-2})
    tower = engine.model.module.hf.model.visual
    unsharded = []
    for module in tower.modules():
        if hasattr(module, "unshard"):
            module.unshard = lambda *args, **kwargs: unsharded.append(1)
    before = full_weights(engine)
    engine.generate([[5, 6]], _greedy(3))
    text = engine.ledger.gathered_bytes
    engine.forward_backward([pack(SEQUENCES)], cross_entropy)
    engine.optim_step()
    after = full_weights(engine)
    visual = [n for n in before if n.startswith("model.visual.")]
    return {
        "same": all(torch.equal(before[n], after[n]) for n in visual) and len(visual) > 0,
        "unsharded": unsharded,
        "state": len(engine.optimizer.state) == len(before) - len(visual),
        "text bytes": text == sum(4 * w.numel() for n, w in before.items() if n not in visual),
    }


def _greedy(count: int):
    from inference_v2 import SamplingParams

    return SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)


def test_the_vision_tower_is_frozen_and_never_gathered(pool2, tmp_path):
    save_tiny(tmp_path, "exaone4_5")
    for result in pool2.run(vision_tower, str(tmp_path)):
        assert result == {"same": True, "unsharded": [], "state": True, "text bytes": True}


# -- modules in memory


def from_memory(adapters: bool) -> dict:
    """Ranks start from different weights; adapters are fp32 and trained, the rest bf16 and frozen."""
    rank = open_mesh(HybridConfig()).rank
    hf = tiny_model("llama", seed=rank, dtype=torch.bfloat16 if adapters else torch.float32)
    if adapters:
        hf.requires_grad_(False)
        for layer in hf.model.layers:
            layer.mlp.adapter = nn.Sequential(nn.Linear(96, 4, bias=False), nn.Linear(4, 64, bias=False))
            for linear in layer.mlp.adapter:
                nn.init.normal_(linear.weight, std=0.1)
            layer.mlp.forward = _with_adapter(layer.mlp)
    twin = copy.deepcopy(hf)
    engine = HybridEngine.from_module(hf, {"optimizer": {"name": "sgd", "lr": 0.1}, "activation_checkpointing": adapters})
    dtypes = {n: p.dtype for n, p in engine.model.parameters().items()}
    engine.forward_backward([pack(SEQUENCES[:3] if rank == 0 else SEQUENCES[3:])], cross_entropy)
    gradients = full_gradients(engine)
    weights = full_weights(engine)
    rank_0 = {} if adapters else dict(tiny_model("llama", seed=0).named_parameters())
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(weights[name])
    _hf_nll(twin.float(), _with_adapter if adapters else None).backward()
    expected = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    return {
        "error": max(relative_error(gradients[n], expected[n]) for n in expected),
        "trained": sorted({str(dtypes[n]) for n in gradients}),
        "frozen": sorted({str(d) for n, d in dtypes.items() if n not in gradients}),
        "rank 0's": all(torch.equal(weights[n], p) for n, p in rank_0.items()),
    }


def _with_adapter(mlp: nn.Module):
    def forward(x):
        gated = mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
        return mlp.down_proj(gated) + mlp.adapter(gated)

    return forward


def _hf_nll(hf: nn.Module, rebind) -> torch.Tensor:
    if rebind is not None:  # the deep copy's patched forward still points at the original
        for layer in hf.model.layers:
            layer.mlp.forward = rebind(layer.mlp)
    return -_hf_logprobs(hf, hf.config.vocab_size).sum() / sum(len(s) - 1 for s in SEQUENCES)


def test_a_module_in_memory_trains_with_rank_0s_weights(pool2):
    for result in pool2.run(from_memory, False):
        assert result["rank 0's"]
        assert result["error"] < 1e-5
        assert result["trained"] == ["torch.float32"]


def test_fp32_adapters_train_on_a_frozen_bf16_model(pool2):
    for result in pool2.run(from_memory, True):
        assert result["trained"] == ["torch.float32"]
        assert result["frozen"] == ["torch.bfloat16"]
        assert result["error"] < 1e-5  # compute is fp32


def test_recomputation_renames_nothing_and_runs_each_layer_twice(tmp_path):
    save_tiny(tmp_path, "llama")
    names, calls = {}, {}
    for flag in (False, True):
        engine = make_engine(str(tmp_path), activation_checkpointing=flag)
        names[flag] = list(engine.model.parameters())
        count = []
        engine.model.module.layers[2].mlp.register_forward_pre_hook(lambda *args: count.append(1))  # noqa: B023
        for train in (False, True):
            engine.model.module.train(train)
            engine.forward_backward([pack(SEQUENCES)], cross_entropy)
        calls[flag] = len(count)
        engine.score(pack(SEQUENCES))
        assert len(count) == calls[flag] + 1
    assert names[True] == names[False] == [n for n, _ in hf_module(str(tmp_path)).named_parameters()]
    assert calls == {False: 2, True: 4}


# -- teachers


def teacher(path: str) -> dict:
    engine = make_engine(path, compute_dtype="bfloat16")
    frozen = ShardedModel.from_pretrained(path, engine.config, engine.mesh, trainable=False)
    average = ShardedModel.from_pretrained(path, engine.config, engine.mesh, trainable=False, masters=True)
    frozen.module.train()
    batch = pack(SEQUENCES)
    before = frozen.hidden_states(batch)
    start = {n: s.clone() for n, s in engine.model.local_shards().items()}
    with frozen.head() as head:
        head_rows, needs_grad = head.weight.shape[0], head.weight.requires_grad
        engine.forward_backward([batch], cross_entropy)  # the student's loss, while the teacher's head is held
        still = bool(torch.isfinite(head.weight).all()) and head.weight.numel() == head_rows * 64
    engine.optim_step()
    average.lerp_(engine.model, 0.25)
    now, mean = engine.model.local_shards(), average.local_shards()
    return {
        "dtypes": [str(next(iter(m.parameters().values())).dtype) for m in (frozen, average)],
        "grad": needs_grad or any(p.requires_grad for m in (frozen, average) for p in m.parameters().values()),
        "head": (head_rows, still),
        "same": torch.equal(before, frozen.hidden_states(batch)) and before.dtype == torch.bfloat16,
        "mode": frozen.module.training,
        "average": max((mean[n] - (0.75 * start[n] + 0.25 * now[n])).abs().max().item() for n in mean if mean[n].numel()),
        "left": gathered(frozen.module) + gathered(average.module),
    }


@pytest.mark.parametrize("tied", [False, True])
def test_teachers_are_frozen_shards_beside_the_student(pool2, tmp_path, tied):
    save_tiny(tmp_path, "qwen2", tie_word_embeddings=tied)
    for result in pool2.run(teacher, str(tmp_path)):
        assert result["dtypes"] == ["torch.bfloat16", "torch.float32"]
        assert not result["grad"]
        assert result["head"] == (96, True)
        assert result["same"]
        assert result["mode"]
        assert result["average"] < 1e-6
        assert result["left"] == []


def test_averages_of_different_models_are_refused(tmp_path):
    save_tiny(tmp_path / "a", "llama")
    save_tiny(tmp_path / "b", "llama", num_hidden_layers=2)
    with pytest.raises(ValueError, match="different parameters"):
        _model(tmp_path / "a").lerp_(_model(tmp_path / "b"), 0.5)


def fails_in_a_forward(path: str) -> bool:
    """A forward that raises leaves the module trainable, its mode as it was, nothing gathered."""
    engine = make_engine(path)
    module = engine.model.module
    module.train()
    handle = module.layers[1].mlp.register_forward_hook(_boom)
    with pytest.raises(ArithmeticError):
        engine.score(pack(SEQUENCES))
    with pytest.raises(ArithmeticError):
        engine.forward_backward([pack(SEQUENCES)], cross_entropy)
    kept = module.training and not gathered(module) and not full_gradients(engine)
    handle.remove()
    engine.forward_backward([pack(SEQUENCES)], cross_entropy)
    return kept and engine.optim_step()["grad_norm"] > 0


def _boom(*args: object) -> None:
    raise ArithmeticError("boom")


def test_a_forward_that_raises_leaves_a_working_model(pool2, tmp_path):
    save_tiny(tmp_path, "llama")
    assert pool2.run(fails_in_a_forward, str(tmp_path)) == [True, True]


# -- memory


def load_peak(path: str, config: dict) -> dict:
    """Tensors alive at each large read from the file, beyond what lived before."""
    peak, largest = [0], [0]
    plain = FolderSource.get
    before = live_bytes()

    def get(self, name, rows=None):
        tensor = plain(self, name, rows)  # a view of the whole tensor, which is mapped and not read
        largest[0] = max(largest[0], tensor.nbytes)
        if tensor.nbytes == largest[0]:
            peak[0] = max(peak[0], live_bytes() - before)
        return tensor

    FolderSource.get = get
    try:
        model = _model(path, config)
    finally:
        FolderSource.get = plain
    return {"peak": peak[0], "shards": bytes_of(list(model.parameters().values())), "largest": largest[0]}


@pytest.mark.parametrize("ranks", [2, 4])
def test_loading_holds_the_shards_and_one_tensor(request, tmp_path, ranks):
    save_tiny(tmp_path, "llama", hidden_size=128, vocab_size=1001)
    total = sum(t.nbytes for t in load_file(tmp_path / "model.safetensors").values())
    whole = 1001 * 128 * 4
    for held in request.getfixturevalue(f"pool{ranks}").run(load_peak, str(tmp_path), {}):
        assert held["shards"] <= 1.05 * total / ranks
        assert held["peak"] <= held["shards"] + whole + 30_000  # and the rotary table's buffers
        assert held["largest"] <= whole / ranks + 1000  # what is copied out of it
