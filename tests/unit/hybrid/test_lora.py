"""Adapters in one process: what is trained and what is not, rollouts, the base beside them, peft's folders, refusals."""

from __future__ import annotations

import json
import sys

import peft
import pytest
import torch
from hybrid_cases import (
    cross_entropy,
    full_gradients,
    full_weights,
    hf_greedy,
    hf_module,
    make_engine,
    pack,
    relative_error,
)
from lora_cases import SEQUENCES, base_weights, save_base_and_adapter, token_logprobs, with_peft
from safetensors.torch import load_file, save_file
from tiny import save_tiny, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from hybrid import HybridEngine, in_flight
from hybrid.checkpoint import read_header
from hybrid.config import resolve
from hybrid.modes import Generation
from hybrid.runner import Runner
from inference_v2 import SamplingParams
from trainers.ema import PolicyAverage

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5], [11]]
ADAMW = {"name": "adamw", "lr": 1e-2, "max_grad_norm": None}
BATCHES = [pack(SEQUENCES[:4]), pack(SEQUENCES[4:])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`base`, `adapter` and what plain peft makes of them."""
    path = tmp_path_factory.mktemp("lora")
    save_base_and_adapter(path, "qwen3", num_hidden_layers=2)
    return path


def _engine(folder, **config: object) -> HybridEngine:
    return make_engine(str(folder / "base"), **{"lora": {"path": str(folder / "adapter")}, "optimizer": ADAMW, **config})


def _train(engine: HybridEngine, steps: int = 2) -> float:
    loss = 0.0
    for _ in range(steps):
        loss = engine.forward_backward(BATCHES, cross_entropy)["loss"]
        engine.optim_step()
    return loss


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], t) for n, t in b.items())


# -- what is trained


@pytest.mark.parametrize(
    ("lora", "freeze", "trained"),
    [
        ({}, [], 2 * 7 * 2),
        ({"target_modules": ["q_proj", "v_proj"]}, [], 2 * 2 * 2),
        ({"target_modules": ["layers.1.mlp.up_proj", "o_proj"]}, [], 2 * 3),
        ({"exclude": ["mlp.down_proj", "k_proj"]}, [], 2 * 5 * 2),
        ({}, [r"layers\.0\."], 2 * 7),
        ({}, ["lora_A", "embed_tokens"], 7 * 2),
    ],
    ids=str,
)
def test_the_optimizer_has_every_trainable_tensor_once_and_only_those_move(folder, lora, freeze, trained):
    engine = _engine(folder, lora={"r": 3, **lora}, freeze=freeze)
    before = full_weights(engine)
    ours = [id(p) for group in engine.optimizer.param_groups for p in group["params"]]
    trainable = {n: p for n, p in engine.model.parameters().items() if p.requires_grad}
    assert len(ours) == len(set(ours)) == trained
    assert (
        set(ours) == {id(p) for p in trainable.values()} == {id(p) for p in engine.model.module.parameters() if p.requires_grad}
    )
    assert all("lora_" in name for name in trainable)
    _train(engine, 3)
    moved = {n for n, t in full_weights(engine).items() if not torch.equal(before[n], t)}
    assert moved == trainable.keys()


def test_everything_frozen_is_refused(folder):
    with pytest.raises(ValueError, match="every parameter is frozen"):
        _engine(folder, freeze=["lora_"])
    with pytest.raises(ValueError, match=r"'lora_C' is found in no parameter's name"):
        _engine(folder, freeze=["lora_C"])


def test_in_bf16_the_base_is_bf16_without_masters_and_the_adapter_fp32(folder):
    engine = _engine(folder, lora={"r": 4}, compute_dtype="bfloat16")
    tensors = engine.model.adapter.tensors
    parameters = engine.model.parameters()
    assert {p.dtype for n, p in parameters.items() if n in tensors} == {torch.float32}
    assert {p.dtype for n, p in parameters.items() if n not in tensors} == {torch.bfloat16}
    before = base_weights(engine)
    engine.score(BATCHES[0], adapter=False)  # FSDP settles dtypes at the first forward, by what then requires a gradient
    first = engine.forward_backward(BATCHES, cross_entropy)["loss"]
    assert {p.grad.dtype for p in parameters.values() if p.grad is not None} == {torch.float32}
    engine.optim_step()
    assert {t.dtype for state in engine.optimizer.state.values() for t in state.values()} == {torch.float32}
    assert _train(engine, 8) < 0.8 * first
    assert _same(before, base_weights(engine))


def test_in_bf16_rollouts_are_of_the_product_of_what_trains(folder, tmp_path):
    """fp32 sums, rounded once: against the merged export, and against the training forward within bf16's noise."""
    engine = _engine(folder, compute_dtype="bfloat16")
    _train(engine)
    engine.save_pretrained(tmp_path / "merged", "float32")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    source = engine.model.source()
    for prefix in ("", *source.prefixes):
        with source.scope(prefix):
            for name in (n for n in source.names() if n.startswith(f"{prefix}.") or (not prefix and ".layers." not in n)):
                got = source.get(name)
                assert got.dtype == torch.bfloat16
                assert relative_error(got.float(), merged[name]) < 2**-8  # half a unit of bf16, A and B rounded too
    (sample,) = engine.generate(PROMPTS[:1], GREEDY)[0]
    own = engine.score(pack([[*PROMPTS[0], *sample.token_ids]], counted_from=len(PROMPTS[0])))
    assert (own - torch.tensor(sample.logprobs_raw)).abs().mean() < 0.1


def test_dropout_is_off_until_the_engines_dropout_is_on(folder):
    """Two forwards of one batch: equal, or not."""
    losses = {}
    for dropout in (False, True):
        engine = _engine(folder, lora={"path": str(folder / "adapter"), "dropout": 0.5}, dropout=dropout)
        losses[dropout] = {engine.forward_backward(BATCHES, cross_entropy)["loss"] for _ in range(2)}
        losses[f"scores {dropout}"] = {engine.score(BATCHES[0]).sum().item() for _ in range(2)}
    assert [len(values) for values in losses.values()] == [1, 1, 2, 1]


# -- rollouts


@pytest.mark.parametrize(
    ("family", "lora", "rollout"),
    [
        ("qwen2", {"target_modules": ["q_proj", "v_proj"], "rslora": True}, {}),
        ("qwen2", {"init": "gaussian"}, {"gather": "stream"}),
        ("exaone4", {}, {"on_leave": "keep"}),
        ("exaone4_5", {}, {}),
        ("gpt2", {}, {}),  # unregistered, and its weights are [in, out]
        ("granite", {"target_modules": ["q_proj", "down_proj"]}, {"on_leave": "offload"}),
    ],
    ids=str,
)
def test_a_rollout_is_that_of_the_merged_folder_and_of_the_training_forward(tmp_path, family, lora, rollout):
    save_tiny(tmp_path / "base", family, tie_word_embeddings=family == "exaone4_5")
    engine = make_engine(str(tmp_path / "base"), lora={"r": 4, **lora}, rollout=rollout, optimizer=ADAMW)
    first = engine.generate(PROMPTS, GREEDY)
    before = base_weights(engine)
    _train(engine, 3)
    completions = engine.generate(PROMPTS, GREEDY)
    assert [s.token_ids for (s,) in completions] != [s.token_ids for (s,) in first]
    engine.save_pretrained(tmp_path / "merged")
    hf = hf_module(str(tmp_path / "merged"))
    for prompt, (sample,) in zip(PROMPTS, completions, strict=True):
        assert sample.token_ids == hf_greedy(hf, prompt, GREEDY.max_new_tokens)
        own = engine.score(pack([[*prompt, *sample.token_ids]], counted_from=len(prompt)))
        assert (own - torch.tensor(sample.logprobs_raw)).abs().max() < 1e-4
    assert _same(before, base_weights(engine))
    if family == "exaone4_5":
        tower = {n: t for n, t in load_file(tmp_path / "base" / "model.safetensors").items() if "visual" in n}
        merged = load_file(tmp_path / "merged" / "model.safetensors")
        assert tower
        assert all(torch.equal(merged[n], t) for n, t in tower.items())


@pytest.mark.parametrize("targets", [["q_proj", "k_proj", "v_proj"], "all-linear"], ids=str)
@pytest.mark.parametrize("gather", ["full", "stream"])
def test_a_rollout_leaves_every_weight_of_base_and_adapter_as_it_was(tmp_path, targets, gather):
    """Its copy holds q, k and v in one matrix, of which k and v have half of q's rows."""
    save_base_and_adapter(tmp_path, "llama", targets=targets, num_hidden_layers=2)
    engine = _engine(tmp_path, rollout={"gather": gather, "on_leave": "keep"})
    before = full_weights(engine)
    completions = engine.generate(PROMPTS, GREEDY)
    assert _same(before, full_weights(engine))
    adapted, base = with_peft(tmp_path / "base", tmp_path / "adapter"), hf_module(str(tmp_path / "base"))
    for model, is_it in ((adapted, True), (base, False)):
        wanted = [hf_greedy(model, prompt, GREEDY.max_new_tokens) for prompt in PROMPTS]
        assert ([sample.token_ids for (sample,) in completions] == wanted) is is_it


def test_rows_of_a_weight_are_rows_of_the_product(folder):
    engine = _engine(folder)
    source = engine.model.source()
    name = "model.layers.1.self_attn.v_proj.weight"
    with source.scope("model.layers.1"):
        whole = source.get(name)
        assert torch.equal(source.get(name, slice(3, 17)), whole[3:17])
        assert not torch.equal(whole, engine.model.parameters()[name].to_local())
    assert "model.layers.1.self_attn.v_proj.lora_A.weight" not in source.names()


def test_two_hundred_swaps_leave_the_base_as_it_was(folder):
    engine = _engine(folder)
    before = base_weights(engine)
    tokens = set()
    for cycle in range(200):
        with engine.generating() as runner:
            tokens |= {s.token_ids for (s,) in runner.generate(PROMPTS[:1], SamplingParams(max_new_tokens=2, temperature=0.0))}
        if cycle % 20 == 0:
            _train(engine, 1)
    assert len(tokens) > 1
    assert _same(before, base_weights(engine))


def test_an_error_while_generating_leaves_everything_as_it_was(folder, monkeypatch):
    engine = _engine(folder)
    before = full_weights(engine)
    wanted = engine.generate(PROMPTS, GREEDY)

    def fail(runner: Runner) -> None:
        runner.generate(PROMPTS, GREEDY)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), engine.generating() as runner:
        fail(runner)
    assert _same(before, full_weights(engine))
    assert [s.token_ids for (s,) in engine.generate(PROMPTS, GREEDY)] == [s.token_ids for (s,) in wanted]
    _train(engine, 1)
    assert not _same(before, full_weights(engine))


# -- the base beside the adapter


@pytest.mark.parametrize("on_leave", ["keep", "offload", "free"])
def test_the_base_is_scored_as_it_was_while_the_adapter_trains(folder, on_leave):
    """Alternately, with both fused copies kept: neither is ever taken for the other."""
    engine = _engine(folder, rollout={"on_leave": on_leave})
    base = hf_module(str(folder / "base"))
    wanted = token_logprobs(base, SEQUENCES)
    batch = pack(SEQUENCES)
    plain = make_engine(str(folder / "base")).score(batch)
    for _ in range(3):
        _train(engine, 1)
        adapted = engine.score(batch)
        assert torch.equal(engine.score(batch, adapter=False), plain)
        by_base = torch.cat([s.logprobs for s in engine.score_sequences(SEQUENCES, adapter=False)])
        by_policy = torch.cat([s.logprobs for s in engine.score_sequences(SEQUENCES, unchanged=True)])
        assert (by_base - wanted).abs().max() < 1e-4
        assert (by_policy - adapted).abs().max() < 1e-4
        assert (adapted - wanted).abs().max() > 0.1
    gathered = engine._base.ledger.gathered_bytes
    assert gathered == (0 if on_leave != "free" else engine.ledger.gathered_bytes)


def test_a_generation_of_the_base_scores_hidden_states_too(folder):
    engine = _engine(folder, debug_checksums=True)
    for from_files in (False, True):
        reference = Generation(engine.model, keep_pool=False, adapter=False, from_files=from_files)
        for _ in range(2):
            _train(engine, 1)  # its version stays 0: the base does not change
            scored = reference.score(0, SEQUENCES, hidden=True)
            wanted = engine.model.hidden_states(pack(SEQUENCES), adapter=False)
            assert (torch.cat([s.hidden for s in scored]) - wanted).abs().max() < 1e-4
        reference.close()


def test_the_adapter_is_on_again_after_an_error(folder):
    engine = _engine(folder)
    wanted = engine.score(BATCHES[0])
    with pytest.raises(ValueError, match="token_ids hold ids"):
        engine.score(pack([[5, 1000]]), adapter=False)

    def fail(hidden: Tensor, head: object) -> Tensor:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), engine.model.adapter.off():
        engine.model.module(BATCHES[0], fail)
    in_flight.abandon(engine.model.module)
    assert torch.equal(engine.score(BATCHES[0]), wanted)


def test_without_an_adapter_there_is_no_base_to_ask(folder):
    engine = make_engine(str(folder / "base"))
    for ask in (
        lambda: engine.score(BATCHES[0], adapter=False),
        lambda: engine.score_sequences(SEQUENCES, adapter=False),
        lambda: Generation(engine.model, adapter=False),
        lambda: engine.save_adapter(folder / "none"),
    ):
        with pytest.raises(ValueError, match=r"no adapter; .* set engine\.lora"):
            ask()


# -- files


def test_a_saved_adapter_is_pefts_and_goes_in_again(folder, tmp_path):
    engine = _engine(folder, lora={"r": 3})
    _train(engine)
    engine.save_adapter(tmp_path / "adapter")
    engine.save_adapter(tmp_path / "adapter")  # over an earlier one
    engine.save_pretrained(tmp_path / "merged")
    by_peft = token_logprobs(with_peft(str(folder / "base"), str(tmp_path / "adapter")), SEQUENCES)
    by_merged = token_logprobs(hf_module(str(tmp_path / "merged")), SEQUENCES)
    own = engine.score(pack(SEQUENCES))
    assert (by_peft - own).abs().max() < 1e-5
    assert (by_merged - own).abs().max() < 1e-5
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert settings["base_model_name_or_path"] == str(folder / "base")
    again = _engine(folder, lora={"path": str(tmp_path / "adapter")})
    assert _same(full_weights(engine), full_weights(again))
    for kept in ("adapter/notes.txt", "adapter/checkpoint-1/optimizer.pt"):
        (tmp_path / kept).parent.mkdir(exist_ok=True)
        (tmp_path / kept).write_text("a user's")
        with pytest.raises(ValueError, match=f"holds more than an adapter .{kept.split('/')[1]}"):
            engine.save_adapter(tmp_path / "adapter")
        assert (tmp_path / kept).read_text() == "a user's"
        (tmp_path / kept).unlink()
    with pytest.raises(ValueError, match="exists and holds more than an adapter"):
        engine.save_adapter(tmp_path / "merged")


def test_a_sequence_classifiers_adapter_goes_in_as_peft_writes_it(folder, tmp_path):
    classifier = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        settings = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, task_type="SEQ_CLS")
        theirs = peft.get_peft_model(classifier, settings).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["modules_to_save"] == ["classifier", "score"]
    engine = HybridEngine.from_pretrained(str(folder / "base"), {"lora": {"path": str(tmp_path / "adapter")}}, scalar=True)
    with torch.no_grad():
        wanted = torch.stack([theirs(input_ids=torch.tensor([s])).logits[0, 0] for s in SEQUENCES])
    scores = engine.model.scores(pack([[*s, 3] for s in SEQUENCES]))  # at the token before the appended one
    ends = torch.tensor([len(s) for s in SEQUENCES]).cumsum(0) - 1
    assert (scores[ends] - wanted).abs().max() < 1e-5


def test_ranks_and_alphas_of_single_layers_are_kept(folder, tmp_path):
    """A folder with a rank pattern: peft's own features that are still W + s B A."""
    settings = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=r".*\.(q_proj|up_proj)", init_lora_weights=False, rank_pattern={"up_proj": 5},
        alpha_pattern={"q_proj": 9}, use_rslora=True,
    )  # fmt: skip
    peft.get_peft_model(hf_module(str(folder / "base")), settings).save_pretrained(tmp_path / "in")
    engine = _engine(folder, lora={"path": str(tmp_path / "in")})
    wanted = token_logprobs(with_peft(str(folder / "base"), str(tmp_path / "in")), SEQUENCES)
    assert (engine.score(pack(SEQUENCES)) - wanted).abs().max() < 1e-5
    engine.save_pretrained(tmp_path / "merged")
    assert (token_logprobs(hf_module(str(tmp_path / "merged")), SEQUENCES) - wanted).abs().max() < 1e-5


def test_an_average_of_the_policy_is_of_the_product_and_exported_as_it_is(folder, tmp_path):
    engine = _engine(folder)
    average = PolicyAverage(engine, 0.75)
    engine.save_pretrained(tmp_path / "before")
    _train(engine, 1)
    average.after_step()
    engine.save_pretrained(tmp_path / "after")
    average.save_pretrained(tmp_path / "average")
    before, after, mean = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "after", "average"))
    assert mean.keys() == before.keys()
    assert max((before[n].lerp(after[n], 0.25) - t).abs().max() for n, t in mean.items()) < 1e-6
    assert not _same(before, mean)


def test_a_checkpoint_holds_the_adapter_alone_and_resumes_to_the_bit(folder, tmp_path):
    engine = _engine(folder)
    _train(engine)
    engine.save(tmp_path / "c", {"step": 2})
    header = read_header(tmp_path / "c")
    held = {name for file in (tmp_path / "c" / "shards").glob("*.safetensors") for name in load_file(file)}
    assert {n for n in held if n.startswith("model.")} == {f"model.{n}" for n in engine.model.adapter.tensors}
    assert len(header["state"]["bases"]["policy"]) == 64
    again = _engine(folder)
    assert again.load(tmp_path / "c") == {"step": 2}
    for one in (engine, again):
        _train(one)
    assert _same(full_weights(engine), full_weights(again))


@pytest.mark.parametrize("other", ["one weight", "compute_dtype", "plain"])
def test_a_checkpoint_on_another_base_is_refused_before_anything_changes(folder, tmp_path, other):
    engine = _engine(folder)
    _train(engine)
    engine.save(tmp_path / "c")
    save_tiny(tmp_path / "base", "qwen3", num_hidden_layers=2)
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, [4, 5]] = weights["model.layers.1.mlp.up_proj.weight"][3, [5, 4]]
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    config = {"compute_dtype": "bfloat16"} if other == "compute_dtype" else {}
    lora = None if other == "plain" else {"path": str(folder / "adapter")}
    path = tmp_path if other == "one weight" else folder
    here = _engine(path, lora=lora, **config)
    before = full_weights(here)
    with pytest.raises(
        ValueError, match="does not fit" if other == "plain" else "trained on another base model than the policy's"
    ):
        here.load(tmp_path / "c")
    assert _same(before, full_weights(here))


# -- modules in memory


def test_a_module_in_memory_gets_an_adapter(folder):
    engine = HybridEngine.from_module(hf_module(str(folder / "base")), {"lora": {"r": 3}, "optimizer": ADAMW, "vocab_limit": 79})
    loaded = _engine(folder, lora={"r": 3})
    assert _same(full_weights(loaded), full_weights(engine))
    for one in (engine, loaded):
        _train(one)
    assert _same(full_weights(loaded), full_weights(engine))
    assert [s.token_ids for (s,) in engine.generate(PROMPTS, GREEDY)] == [
        s.token_ids for (s,) in loaded.generate(PROMPTS, GREEDY)
    ]


def test_a_peft_model_is_trained_as_it_is(folder):
    model = with_peft(str(folder / "base"), str(folder / "adapter"))
    with pytest.raises(ValueError, match=r"engine\.lora is set and the module has an adapter"):
        HybridEngine.from_module(model, {"lora": {}})
    model.set_requires_grad("default", True)
    engine = HybridEngine.from_module(model, {"compute_dtype": "bfloat16", "optimizer": ADAMW})
    assert {str(p.dtype) for n, p in engine.model.parameters().items() if "lora_" not in n} == {"torch.bfloat16"}
    engine = HybridEngine.from_module(with_trainable_adapter(folder), {"vocab_limit": 79})
    engine.forward_backward([pack(SEQUENCES)], cross_entropy)
    reference = load_file(folder / "reference.safetensors")
    assert max(relative_error(g, reference[n]) for n, g in full_gradients(engine).items()) < 1e-5
    with pytest.raises(ValueError, match="every parameter is frozen"):
        HybridEngine.from_module(with_peft(str(folder / "base"), str(folder / "adapter")))  # loaded for inference


def with_trainable_adapter(folder) -> nn.Module:
    return peft.PeftModel.from_pretrained(hf_module(str(folder / "base")), str(folder / "adapter"), is_trainable=True).eval()


def _dora() -> nn.Module:
    return peft.get_peft_model(
        tiny_model("llama", num_hidden_layers=1), peft.LoraConfig(target_modules=["q_proj"], use_dora=True)
    )


def _merged() -> nn.Module:
    model = peft.get_peft_model(tiny_model("llama", num_hidden_layers=1), peft.LoraConfig(target_modules=["q_proj"]))
    model.merge_adapter()
    return model


def _two() -> nn.Module:
    model = peft.get_peft_model(tiny_model("llama", num_hidden_layers=1), peft.LoraConfig(target_modules=["q_proj"]))
    model.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"]))
    return model


def _ia3() -> nn.Module:
    settings = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    return peft.get_peft_model(tiny_model("llama", num_hidden_layers=1), settings)


def _head() -> nn.Module:
    return peft.get_peft_model(tiny_model("llama", num_hidden_layers=1), peft.LoraConfig(target_modules=["lm_head"]))


def _saved() -> nn.Module:
    settings = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    return peft.get_peft_model(tiny_model("llama", num_hidden_layers=1), settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_dora, "use_dora=True; allowed: plain LoRA"),
        (_merged, "merged, turned off, or no plain LoRA"),
        (_two, r"adapters \['default', 'second'\]; allowed: one"),
        (_ia3, "peft_type=IA3; allowed: LORA"),
        (_head, r"lm_head \(Linear\) is adapted; allowed: linear layers of the text decoder"),
        (_saved, r"modules_to_save=\['lm_head'\]"),
    ],
)
def test_a_peft_model_that_is_more_than_a_product_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        HybridEngine.from_module(make())


# -- what cannot be adapted


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"target_modules": ["lm_head"]}, "'lm_head' is no linear layer of the decoder .* q_proj, k_proj"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "'embed_tokens' is no linear layer"),
        ({"target_modules": ["proj"]}, "'proj' is no linear layer"),
        ({"exclude": ["nothing"]}, "exclude: 'nothing' is no linear layer"),
        ({"target_modules": ["q_proj"], "exclude": ["self_attn.q_proj"]}, "leaves nothing to adapt"),
        ({"path": "/nowhere"}, r"lora\.path=/nowhere: no adapter_config\.json"),
    ],
    ids=str,
)
def test_targets_that_mean_nothing_are_refused(folder, lora, message):
    with pytest.raises(ValueError, match=message):
        _engine(folder, lora=lora)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_fused_experts_are_refused_and_the_attention_beside_them_is_adapted(family):
    def engine_with(lora: dict) -> HybridEngine:
        hf = tiny_model(family, num_hidden_layers=2, num_experts=4, num_local_experts=4, num_experts_per_tok=2)
        return HybridEngine.from_module(hf, {"lora": lora})

    with pytest.raises(ValueError, match=r"experts\.\w+ is no linear layer .* name the layers to adapt, among q_proj"):
        engine_with({})
    with pytest.raises(ValueError, match="'experts' is no linear layer"):
        engine_with({"target_modules": ["q_proj", "experts"]})
    engine = engine_with({"target_modules": ["q_proj", "o_proj"]})
    assert len(engine.model.adapter.layers) == 4
    _train(engine, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "allowed: LORA|unexpected keyword"),
        ({"use_dora": True}, "use_dora=True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which changes the base"),
        ({"bias": "all"}, "bias='all'"),
        ({"target_modules": ["lm_head"]}, r"lm_head \(Linear\) is adapted"),
        ({"target_modules": ["q_proj"]}, r"surplus: \['model\.layers\.0\.mlp\.down_proj\.lora_A\.weight'"),
        ({"target_modules": ["nothing"]}, "nothing"),
        ({"r": 5}, r"lora_A\.weight is \[3, 96\]; the model needs \[5, 96\]"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
    ids=str,
)
def test_a_folder_that_is_no_plain_adapter_of_this_model_is_refused(folder, tmp_path, change, message):
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | change))
    (tmp_path / "adapter_model.safetensors").write_bytes((folder / "adapter" / "adapter_model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=message):
        _engine(folder, lora={"path": str(tmp_path)})


@pytest.mark.parametrize("broken", ["cut", "pickle"])
def test_a_folder_without_whole_safetensors_is_refused(folder, tmp_path, broken):
    (tmp_path / "adapter_config.json").write_text((folder / "adapter" / "adapter_config.json").read_text())
    name = "adapter_model.bin" if broken == "pickle" else "adapter_model.safetensors"
    (tmp_path / name).write_bytes((folder / "adapter" / "adapter_model.safetensors").read_bytes()[:100])
    with pytest.raises(ValueError, match=r"no adapter_model\.safetensors|cut short"):
        _engine(folder, lora={"path": str(tmp_path)})


def test_without_peft_the_line_that_installs_it_is_given(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="pip install peft"):
        _engine(folder, lora={})


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rr": 2}, r"lora\.rr is unknown; nearest: r"),
        ({"r": 0}, r"lora\.r: "),
        ({"target_modules": []}, r"target_modules=\[\]"),
        ({"target_modules": "q_proj"}, r"lora\.target_modules"),
        ({"path": "x", "r": 4}, "r is given and path=x has its own"),
        ({"bias": "all"}, r"lora\.bias is unknown"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_refused(lora, message):
    with pytest.raises(ValueError, match=message):
        resolve({"lora": lora})
    assert resolve({"lora": {"target_modules": ["q_proj"], "exclude": ["x"]}}).lora.target_modules == ("q_proj",)


# -- scalar models


@pytest.mark.parametrize("scalar", [False, True])
def test_all_that_is_trained_has_masters(scalar, folder):
    options = {"lora": {"r": 3}, "compute_dtype": "bfloat16"}
    engine = HybridEngine.from_pretrained(str(folder / "base"), options, scalar=scalar)
    dtypes = {name: p.dtype for name, p in engine.model.parameters().items()}
    trained = engine.model.adapter.tensors
    assert {dtypes[name] for name in trained} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if name not in trained} == {torch.bfloat16}
    assert ("score.weight" in trained) == scalar


def test_a_scalar_model_trains_its_head_with_the_adapter(folder, tmp_path):
    options = {"lora": {"r": 3}, "optimizer": ADAMW}
    engine = HybridEngine.from_pretrained(str(folder / "base"), options, scalar=True)
    batch = pack(SEQUENCES)

    def to_targets(logits: Tensor, chunk) -> tuple[Tensor, dict]:
        return (logits[:, 0] - chunk.targets / 79).square(), {}

    before = full_weights(engine)
    losses = []
    for _ in range(5):
        losses.append(engine.forward_backward([batch], to_targets)["loss"])
        engine.optim_step()
    assert losses[-1] < losses[0]
    moved = {n for n, t in full_weights(engine).items() if not torch.equal(t, before[n])}
    assert moved == engine.model.adapter.tensors
    assert "score.weight" in moved
    engine.save(tmp_path / "c")
    engine.save_adapter(tmp_path / "adapter")
    again = HybridEngine.from_pretrained(str(folder / "base"), options, scalar=True)
    again.load(tmp_path / "c")
    assert torch.equal(again.model.scores(batch), engine.model.scores(batch))
    third = HybridEngine.from_pretrained(str(folder / "base"), {"lora": {"path": str(tmp_path / "adapter")}}, scalar=True)
    assert torch.equal(third.model.scores(batch), engine.model.scores(batch))
    classifier = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(classifier, tmp_path / "adapter").eval()
    with torch.no_grad():
        wanted = torch.stack([theirs(input_ids=torch.tensor([s])).logits[0, 0] for s in SEQUENCES])
    scores = engine.model.scores(pack([[*s, 3] for s in SEQUENCES]))  # at the token before the appended one
    ends = torch.tensor([len(s) for s in SEQUENCES]).cumsum(0) - 1
    assert (scores[ends] - wanted).abs().max() < 1e-5
