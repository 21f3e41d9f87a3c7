"""What nobody planned for: odd settings, ids that do not fit, errors of one rank, calls at the wrong moment."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from hybrid_cases import (
    cross_entropy,
    full_gradients,
    full_weights,
    hf_module,
    make_engine,
    pack,
    ragged_sequences,
    relative_error,
)
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, character_tokenizer, save_tiny, tiny_model

from hybrid import HybridEngine, models
from hybrid.checkpoint import save_checkpoint
from hybrid.folders import FolderError
from hybrid.mesh import gather_texts
from hybrid.models import ShardedModel, build_on_meta
from hybrid.sharding import gathered
from inference_v2 import SamplingParams

SEQUENCES = ragged_sequences(6)
GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
# On 4 ranks most of these tensors have fewer rows than ranks, or leave the last ranks none.
MINUTE = {"hidden_size": 6, "intermediate_size": 3, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2,
          "num_hidden_layers": 2, "vocab_size": 81}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_tiny(path, "llama", num_hidden_layers=2)
    return str(path)


# -- settings


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"zero_stages": 3}, "engine config: zero_stages is unknown; nearest: zero_stage"),
        ({"optimizer": {"learning": 1}}, "engine config: optimizer.learning is unknown; allowed: name, lr, "),
        ({"rollout": {"engine": {"block_sizes": 1}}}, "rollout.engine.block_sizes is unknown; nearest: block_size"),
        ({"zero_stage": 4, "dropout": "maybe"}, "; dropout: "),
        ({"optimizer": {"lr": float("inf")}}, "optimizer.lr: Input should be a finite number"),
        ({"optimizer": {"momentum": 0.9}}, "momentum=0.9 with name=adamw; allowed: name=sgd"),
        ({"optimizer": {"warmup_steps": 5, "total_steps": 3}}, "warmup_steps=5 > total_steps=3"),
        ({"optimizer": {"schedule": "cosine", "warmup_steps": 5}}, "needs optimizer.total_steps"),
        ({"freeze": ["("]}, "'(' is no regular expression"),
        ({"freeze": ["layers", "nonsense"]}, "freeze: 'nonsense' is found in no parameter's name"),
        ({"vocab_limit": 97}, "vocab_limit=97; allowed: up to the model's 96 rows"),
        (["zero_stage"], "engine config: Input should be a valid dictionary"),
        ("ds_config.json", "engine config 'ds_config.json': "),
    ],
)
def test_settings_that_cannot_be_used_are_one_line(folder, config, line):
    with pytest.raises(ValueError) as caught:
        HybridEngine.from_pretrained(folder, config)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_may_be_a_json_file(folder, tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({"optimizer": {"name": "sgd", "lr": 0.5}}))
    engine = HybridEngine.from_pretrained(folder, tmp_path / "c.json")
    assert engine.lr_scheduler.get_last_lr() == [0.5, 0.5]


def test_a_tied_head_is_frozen_by_the_embeddings_name(tmp_path):
    save_tiny(tmp_path, "qwen2", tie_word_embeddings=True, num_hidden_layers=1)
    with pytest.raises(ValueError, match="a tied weight has one name"):
        make_engine(str(tmp_path), freeze=["lm_head"])
    engine = make_engine(str(tmp_path), freeze=["embed_tokens"], activation_checkpointing=True)
    before = full_weights(engine)
    engine.forward_backward([pack(SEQUENCES)], cross_entropy)
    engine.optim_step()
    same = [n for n, w in full_weights(engine).items() if torch.equal(w, before[n])]
    assert same == ["model.embed_tokens.weight"]


def test_a_learned_table_of_positions_is_not_exceeded(tmp_path):
    save_tiny(tmp_path, "gpt2")
    limit = hf_module(str(tmp_path)).config.max_position_embeddings
    with pytest.raises(ValueError, match=f"max_model_len={limit + 1} .*allowed: up to {limit}"):
        make_engine(str(tmp_path), rollout={"engine": {"max_model_len": limit + 1}})


def test_a_tokenizer_from_elsewhere_sets_the_vocabulary(folder, tmp_path):
    save_tiny(tmp_path, "llama", num_hidden_layers=1)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    assert HybridEngine.from_pretrained(str(tmp_path)).model.vocab_limit is None
    assert HybridEngine.from_pretrained(str(tmp_path), tokenizer=folder).model.vocab_limit == 79
    assert HybridEngine.from_module(tiny_model("llama"), tokenizer=character_tokenizer()).model.vocab_limit == 79


# -- small tensors, low precision, all stages


def train_minute(path: str, config: dict) -> dict:
    """One step on four ranks, generation between its two halves; the gradient against HF's."""
    engine = make_engine(path, **config)
    mine = SEQUENCES[engine.rank :: engine.world_size]
    share = sum(len(s) - 1 for s in SEQUENCES)
    for batches in ([pack(mine)], []):  # a second call on which no rank has anything
        engine.forward_backward(batches, cross_entropy)
        for _ in range(2):
            ids = [samples[0].token_ids for samples in engine.generate([[5, 6, 7]], GREEDY)]
    gradients = full_gradients(engine)
    hf = hf_module(path)
    loss = torch.zeros(())
    for sequence in SEQUENCES:
        logits = hf(torch.tensor([sequence])).logits[0, :-1, :79]
        loss = loss + torch.nn.functional.cross_entropy(logits, torch.tensor(sequence[1:]), reduction="sum")
    (loss / share).backward()
    expected = {n: p.grad for n, p in hf.named_parameters()}
    assert gradients.keys() == expected.keys()
    engine.optim_step()
    engine.save(f"{path}/checkpoint")
    weights = full_weights(engine)
    other = make_engine(path, **config)
    other.load(f"{path}/checkpoint")
    other.generate([[5]], GREEDY)
    return {
        "resumed": all(torch.equal(w, weights[n]) for n, w in full_weights(other).items()),
        "error": max(relative_error(gradients[n].float(), expected[n]) for n in expected),
        "dtype": {str(g.dtype) for g in gradients.values()},
        "ids": ids,
        "left": gathered(engine.model.module),
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_smaller_than_the_rank_count_train_at_every_stage(pool4, tmp_path, stage, dtype):
    save_tiny(tmp_path, "qwen3", **MINUTE)
    optimizer = {"name": "adamw"} if dtype == "bfloat16" else {"momentum": 0.9}
    config = {"zero_stage": stage, "master_dtype": dtype, "compute_dtype": dtype, "activation_checkpointing": True,
              "optimizer": optimizer | {"lr": 1e-2}}  # fmt: skip
    results = pool4.run(train_minute, str(tmp_path), config)
    for result in results:
        assert result["error"] < (1e-5 if dtype == "float32" else 0.3)
        assert result["dtype"] == {f"torch.{dtype}"}
        assert result["ids"] == results[0]["ids"]
        assert result["resumed"]
        assert result["left"] == []


# -- ids and weights that do not fit: one line on every rank, before anything runs


def misfits(path: str) -> list[str]:
    engine = make_engine(path, vocab_limit=40)
    fits, high = pack([[5, 6, 7]]), pack([[5, 60, 7]])
    wrong, low = pack([[5, 6, 96]], counted_from=9), pack([[5, -100, 7]])
    lines = []

    def line(verb, *args, **kwargs) -> None:
        with pytest.raises(ValueError) as caught:
            verb(*args, **kwargs)
        lines.append(str(caught.value))

    bad = engine.rank == 1
    for batch in (high, wrong, low):
        line(engine.forward_backward, [batch if bad else fits], cross_entropy)
        line(engine.score, batch if bad else fits)
    line(engine.forward_backward, [fits], cross_entropy, weights=[torch.ones(3 if bad else 2)])
    line(engine.forward_backward, [fits], cross_entropy, denominator=float("nan") if bad else 2.0)
    assert engine.optim_step()["grad_norm"] == 0  # nothing was run
    engine.forward_backward([fits], cross_entropy)
    assert engine.optim_step()["grad_norm"] > 0
    return lines


def test_ids_and_weights_that_do_not_fit_are_one_line_on_every_rank(pool2, folder):
    first, second = pool2.run(misfits, folder, timeout_s=60)
    assert first == second
    assert all(text.startswith("rank 1: ") for text in first)
    targets, same, tokens, _, negative, _, weights, denominator = (text.removeprefix("rank 1: ") for text in first)
    assert targets == same == "targets hold ids from 7 to 60; allowed: 0 to 39; check tokenizer, vocab_limit"
    assert tokens.startswith("token_ids hold ids from 5 to 96; allowed: 0 to 95")
    assert negative.startswith("token_ids hold ids from -100 to 7")
    assert "weights of lengths [3] for targets [2]" in weights
    assert "denominator=nan; allowed: finite" in denominator


def loss_fails_on_rank_1(path: str, stage: int, error: str) -> dict:
    engine = make_engine(path, zero_stage=stage)
    before = full_weights(engine)

    def token_loss(logits, chunk):
        if engine.rank == 1 and chunk.targets[0] == SEQUENCES[1][1]:
            if error == "shape":
                return cross_entropy(logits, chunk)[0][:, None], {}
            raise ArithmeticError("boom\nhere")
        return cross_entropy(logits, chunk)

    batches = [pack([s]) for s in SEQUENCES[:3]]
    with pytest.raises((ArithmeticError, ValueError, RuntimeError)) as caught:
        engine.forward_backward(batches, token_loss)
    dropped = not full_gradients(engine) and not gathered(engine.model.module)
    result = engine.forward_backward(batches, lambda logits, chunk: (cross_entropy(logits, chunk)[0], {"é": chunk.targets * 0.0}))
    return {
        "error": f"{type(caught.value).__name__}: {caught.value}",
        "dropped": dropped,
        "same": all(torch.equal(w, before[n]) for n, w in full_weights(engine).items()),
        "metrics": sorted(result),
        "norm": engine.optim_step()["grad_norm"],
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loss_that_fails_on_one_rank_ends_the_call_on_all_and_training_goes_on(pool2, folder, stage):
    first, second = pool2.run(loss_fails_on_rank_1, folder, stage, "boom", timeout_s=60)
    assert first.pop("error") == "RuntimeError: the loss function failed on rank 1: ArithmeticError: boom here"
    assert second.pop("error") == "ArithmeticError: boom\nhere"
    assert first == second
    assert first["dropped"]
    assert first["same"]
    assert first["metrics"] == ["loss", "tokens", "é"]
    assert first["norm"] > 0


def test_a_loss_of_another_shape_is_refused(pool2, folder):
    first, second = pool2.run(loss_fails_on_rank_1, folder, 3, "shape", timeout_s=60)
    assert "allowed: one value per token" in first["error"]
    assert second["error"].startswith("ValueError: a token loss gave ")


def texts() -> list[list[str]]:
    import torch.distributed as dist

    return [gather_texts("né" * dist.get_rank()), gather_texts("")]


def test_ranks_tell_each_other_texts_of_any_length(pool4):
    assert pool4.run(texts) == [[["", "né", "néné", "nénéné"], [""] * 4]] * 4


# -- calls at the wrong moment


def test_an_engine_can_be_used_inside_inference_mode_and_trained_afterwards(folder):
    engine, plain = (make_engine(folder, rollout={"on_leave": "keep"}) for _ in range(2))
    with torch.inference_mode():
        ids = engine.generate([[5, 6]], GREEDY)[0][0].token_ids
        logprobs = engine.score(pack(SEQUENCES))
        assert torch.is_inference_mode_enabled()
    with torch.no_grad():
        loss = engine.forward_backward([pack(SEQUENCES)], cross_entropy)["loss"]
        assert not torch.is_grad_enabled()
    assert plain.generate([[5, 6]], GREEDY)[0][0].token_ids == ids
    assert torch.equal(plain.score(pack(SEQUENCES)), logprobs)
    assert plain.forward_backward([pack(SEQUENCES)], cross_entropy)["loss"] == loss
    assert engine.optim_step() == plain.optim_step()
    engine.generate([[5, 6]], GREEDY)


def test_weights_do_not_change_while_they_generate(folder, tmp_path):
    engine = make_engine(folder)
    engine.forward_backward([pack(SEQUENCES)], cross_entropy)
    engine.save(tmp_path / "c")
    with engine.generating() as runner:
        version = engine.weight_version
        for verb in (engine.optim_step, lambda: engine.load(tmp_path / "c"), lambda: engine.generate([[5]], GREEDY)):
            with pytest.raises(RuntimeError, match="still inside"):
                verb()
        engine.score(pack(SEQUENCES))
        assert runner.generate([[5]], GREEDY)[0][0].weight_version == version == engine.weight_version
    assert engine.optim_step()["grad_norm"] > 0
    engine.generate([[5]], GREEDY)


@pytest.mark.parametrize("gather", ["full", "stream"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_registered_family_generates_without_its_hf_modules(tmp_path, family, gather):
    save_tiny(tmp_path, family)
    engine = make_engine(str(tmp_path), rollout={"gather": gather})
    called = []
    for module in engine.model.module.modules():
        module.register_forward_pre_hook(lambda m, *args: called.append(type(m).__name__))
    engine.generate([[5, 6]], GREEDY)
    assert called == []
    engine.score(pack(SEQUENCES))
    assert called


@pytest.mark.parametrize("family", ["llama", "granite"])  # the second is served by a module of its own
def test_generation_leaves_the_config_of_the_training_module_alone(tmp_path, family):
    save_tiny(tmp_path, family)
    engine = make_engine(str(tmp_path))
    config = engine.model.module.hf.config
    before = copy.deepcopy(vars(config))
    assert before["_attn_implementation_internal"] is not None
    logprobs = engine.score(pack(SEQUENCES))
    engine.generate([[5, 6]], GREEDY)
    assert vars(config) == before
    assert torch.equal(engine.score(pack(SEQUENCES)), logprobs)


@pytest.mark.parametrize("attention", ["packed", "sdpa", "eager"])  # the last two pad
def test_padding_moves_no_position_of_a_learned_table(tmp_path, attention):
    """Rotary models would hide a shift of all positions alike; gpt2 adds each position's own row."""
    save_tiny(tmp_path, "gpt2")
    engine, hf = make_engine(str(tmp_path), attn_implementation=attention), hf_module(str(tmp_path))
    assert engine.model.packs == (attention == "packed")
    together = engine.score(pack(SEQUENCES)).split([len(s) - 1 for s in SEQUENCES])
    for sequence, row in zip(SEQUENCES, together, strict=True):
        torch.testing.assert_close(row, engine.score(pack([sequence])), rtol=0, atol=1e-5)
        ids = torch.tensor([sequence])
        with torch.no_grad():
            expected = hf(ids).logits[0, :-1, :79].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-5)


def test_generation_between_two_halves_of_a_step_leaves_their_gradient(folder):
    gradients = []
    for generates in (False, True):
        engine = make_engine(folder)
        for half in (SEQUENCES[:3], SEQUENCES[3:]):
            engine.forward_backward([pack(half)], cross_entropy)
            if generates:
                engine.generate([[5]], GREEDY)
        gradients.append(full_gradients(engine))
    assert all(torch.equal(gradients[0][n], gradients[1][n]) for n in gradients[0])


def test_the_generation_config_of_a_checkpoint_does_not_reach_the_sampler(folder, tmp_path):
    save_tiny(tmp_path, "llama", num_hidden_layers=2)
    file = tmp_path / "generation_config.json"
    leaky = {
        "do_sample": True,
        "top_k": 1,
        "temperature": 0.01,
        "repetition_penalty": 9.0,
        "max_new_tokens": 1,
        "eos_token_id": [7],
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | leaky))
    sampling = SamplingParams(max_new_tokens=12, temperature=1.0, ignore_eos=True, seed=5)
    ids = [make_engine(path).generate([[5, 6]], sampling)[0][0].token_ids for path in (folder, str(tmp_path))]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 12
    assert make_engine(str(tmp_path)).model.eos_token_ids == {1, 7}


# -- tables that depend on a length


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)], "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, **FACTORS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("family", "rope", "positions", "limit"),
    [("llama", LONGROPE, 64, None), ("llama", DYNAMIC, 32, 128), ("phi3", LONGROPE, 64, 60)],  # phi3: outside the registry
)
def test_trainer_teacher_and_rollout_share_one_rotary_table(tmp_path, family, rope, positions, limit):
    """Short sequences, for which HF would take the short table, under a limit for which the long one is made."""
    original = {"original_max_position_embeddings": 16} if family == "phi3" else {}  # where its config wants it
    save_tiny(tmp_path, family, max_position_embeddings=positions, rope_parameters=copy.deepcopy(rope), **original)
    engine = make_engine(str(tmp_path), rollout={"engine": {"max_model_len": limit}})
    teacher = ShardedModel.from_pretrained(str(tmp_path), engine.config, engine.mesh, trainable=False)
    sampling = SamplingParams(max_new_tokens=4, temperature=1.0, ignore_eos=True)
    for (sample,) in engine.generate([[5, 6, 7], [9] * 10], sampling):
        batch = pack([[*sample.prompt_ids, *sample.token_ids]], counted_from=len(sample.prompt_ids))
        scored = engine.score(batch)
        assert (scored - torch.tensor(sample.logprobs_raw)).abs().max() < 1e-4
        assert torch.equal(teacher.token_logprobs(batch), scored)


# -- checkpoints and exports


def test_a_checkpoint_that_no_engine_saved_is_refused_before_a_weight_changes(folder, tmp_path):
    engine, other = make_engine(folder), make_engine(folder)
    engine.forward_backward([pack(SEQUENCES)], cross_entropy)
    engine.optim_step()
    save_checkpoint(tmp_path / "c", model=engine.model.parameters(), optimizer=engine.optimizer)
    before = full_weights(other)
    with pytest.raises(ValueError, match=r"its state lacks \['extra', 'schedule'\]"):
        other.load(tmp_path / "c")
    assert all(torch.equal(w, before[n]) for n, w in full_weights(other).items())


def test_a_checkpoint_below_a_file_is_one_line(folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match=f"could not write {tmp_path}/file/c: .*{tmp_path}/file"):
        make_engine(folder).save(tmp_path / "file" / "c")


def test_a_buffer_without_dimension_is_loaded(folder, tmp_path, monkeypatch):
    def build(*args, **options):
        hf = build_on_meta(*args, **options)
        hf.model.register_buffer("gate", torch.zeros(()))
        return hf

    monkeypatch.setattr(models, "build_on_meta", build)
    save_tiny(tmp_path, "llama", num_hidden_layers=2)
    weights = load_file(tmp_path / "model.safetensors") | {"model.gate": torch.tensor(2.5)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert make_engine(str(tmp_path)).model.module.hf.model.gate == 2.5


def test_an_export_in_a_dtype_that_is_none_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="allowed: float32, bfloat16, float16"):
        make_engine(folder).save_pretrained(tmp_path / "out", "load")


def test_a_vision_tower_saved_from_the_base_model_is_exported(tmp_path):
    """Names without `model.` in the file: they are found by the module's."""
    save_tiny(tmp_path / "in", "exaone4_5", tie_word_embeddings=True)
    before = load_file(tmp_path / "in" / "model.safetensors")
    save_file({n.removeprefix("model."): t for n, t in before.items()}, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    make_engine(str(tmp_path / "in"), compute_dtype="bfloat16").save_pretrained(tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[n], t) and after[n].dtype == t.dtype for n, t in before.items() if "visual" in n)
