"""Adapters on two ranks: plain peft's gradients at every stage, rollouts of the product, the base beside it, one fingerprint."""

from __future__ import annotations

import pytest
import torch
from hybrid_cases import cross_entropy, full_gradients, full_weights, hf_greedy, hf_module, make_engine, pack, relative_error
from lora_cases import SEQUENCES, TOKENS, base_weights, save_base_and_adapter, token_logprobs
from safetensors.torch import load_file, save_file

from hybrid import HybridEngine
from hybrid.config import HybridConfig
from hybrid.models import ShardedModel
from hybrid.sharding import gathered
from inference_v2 import SamplingParams

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5], [11]]
SPLIT = [[(0, 1), (1, 3)], [(3, 8)]]  # per rank its micro-batches


@pytest.fixture(scope="module", params=["qwen3", "tied qwen2", "q and v of llama"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("lora")
    family, targets = request.param.split()[-1], ["q_proj", "v_proj"] if "q and v" in request.param else "all-linear"
    save_base_and_adapter(path, family, targets=targets, num_hidden_layers=2, tie_word_embeddings="tied" in request.param)
    return str(path)


@pytest.fixture(scope="module")
def one_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("lora")
    save_base_and_adapter(path, "qwen3")
    return str(path)


def _engine(folder: str, **config: object) -> HybridEngine:
    return make_engine(f"{folder}/base", lora={"path": f"{folder}/adapter"}, **config)


def _mine(engine: HybridEngine) -> list:
    return [pack(SEQUENCES[a:b]) for a, b in SPLIT[engine.rank]]


def _errors(engine: HybridEngine, folder: str) -> float:
    """Of the gradients, against plain peft's."""
    reference = load_file(f"{folder}/reference.safetensors")
    reference.pop("loss")
    gradients = full_gradients(engine)
    assert gradients.keys() == reference.keys() == engine.model.adapter.tensors
    return max(relative_error(gradients[n], reference[n]) for n in reference)


def gradient_error(folder: str, config: dict) -> dict:
    engine = _engine(folder, **config)
    result = engine.forward_backward(_mine(engine), cross_entropy)
    loss = load_file(f"{folder}/reference.safetensors")["loss"].item()
    return {"gradient": _errors(engine, folder), "loss": abs(result["loss"] - loss), "tokens": result["tokens"]}


@pytest.mark.parametrize(
    "config",
    [
        {"activation_checkpointing": True},
        {"zero_stage": 0},
        {"zero_stage": 1, "activation_checkpointing": True},
        {"zero_stage": 2},
        {"fused_layers": False, "attn_implementation": "eager"},
    ],
    ids=str,
)
def test_two_ranks_give_the_gradients_of_plain_peft(pool2, folder, config):
    for result in pool2.run(gradient_error, folder, config):
        assert result["gradient"] < 1e-5
        assert result["loss"] < 1e-5
        assert result["tokens"] == TOKENS


def reference_in_between(folder: str, config: dict) -> dict:
    """Half a step with the adapter, the base's scores in both ways, then the other half."""
    engine = _engine(folder, **config)
    own = SEQUENCES[slice(0, 3) if engine.rank == 0 else slice(3, 8)]
    first = engine.score(pack(own), adapter=False)  # before any forward that trains
    engine.forward_backward([pack(own[:1])], cross_entropy, denominator=TOKENS / 2)  # of each rank
    by_module = engine.score(pack(own), adapter=False)
    scored = engine.score_sequences(own, adapter=False)
    by_copy = torch.cat([s.logprobs for s in scored])
    engine.forward_backward([pack(own[1:])], cross_entropy, denominator=TOKENS / 2)
    expected = token_logprobs(hf_module(f"{folder}/base"), own)
    return {
        "gradient": _errors(engine, folder),
        "module": (by_module - expected).abs().max().item(),
        "first": torch.equal(first, by_module),
        "copy": (by_copy - expected).abs().max().item(),
    }


@pytest.mark.parametrize(
    "config", [{"activation_checkpointing": True}, {"zero_stage": 2, "rollout": {"gather": "stream"}}], ids=str
)
def test_scores_of_the_base_between_two_halves_of_a_step_change_no_gradient(pool2, folder, config):
    for result in pool2.run(reference_in_between, folder, config):
        assert result["gradient"] < 1e-5
        assert result["module"] < 1e-5
        assert result["first"]
        assert result["copy"] < 1e-5


def cycles(folder: str, out: str, gather: str, stage: int) -> dict:
    """Five times generate, train, step. Two ranks write the merged model and its adapter; HF and peft read them."""
    engine = _engine(folder, rollout={"gather": gather}, zero_stage=stage)
    before = base_weights(engine)
    start = {n: t for n, t in full_weights(engine).items() if n not in before}
    wrong, left = [], []
    for _ in range(3):
        engine.forward_backward(_mine(engine), cross_entropy)
        engine.optim_step()
        completions = engine.generate(PROMPTS, GREEDY)
        left += gathered(engine.model.module)
        engine.save_pretrained(out)
        hf = hf_module(out)
        for prompt, (sample,) in zip(PROMPTS, completions, strict=True):
            if sample.token_ids != hf_greedy(hf, prompt, GREEDY.max_new_tokens):
                wrong.append(prompt)
            own = engine.score(pack([[*prompt, *sample.token_ids]], counted_from=len(prompt)))
            wrong += [prompt] if (own - torch.tensor(sample.logprobs_raw)).abs().max() > 1e-4 else []
    after = full_weights(engine)
    return {
        "wrong": wrong,
        "left": left,
        "gather": engine.ledger.gather,
        "base": all(torch.equal(after[n], t) for n, t in before.items()),
        "unmoved": [n for n, t in start.items() if torch.equal(after[n], t)],
    }


@pytest.mark.parametrize(("gather", "stage"), [("full", 3), ("stream", 3), ("full", 0), ("stream", 1)])
def test_rollouts_are_of_the_product_and_the_base_stays_to_the_bit(pool2, one_folder, tmp_path, gather, stage):
    for result in pool2.run(cycles, one_folder, str(tmp_path / "out"), gather, stage):
        assert result == {"wrong": [], "left": [], "gather": gather, "base": True, "unmoved": []}


def fresh(folder: str, path: str | None) -> float:
    """The tensors that a seed gives, written at one rank and compared at others."""
    engine = make_engine(f"{folder}/base", lora={"r": 5, "seed": 7})
    weights = {n: t for n, t in full_weights(engine).items() if n in engine.model.adapter.tensors}
    if engine.world_size == 1:
        save_file(weights, path)
    reference = load_file(path)
    assert weights.keys() == reference.keys()
    assert all(t.abs().max() == 0 for n, t in weights.items() if "lora_B" in n)
    return max((weights[n] - t).abs().max().item() for n, t in reference.items())


def test_what_an_adapter_starts_from_does_not_depend_on_the_rank_count(pool2, one_folder, tmp_path):
    path = str(tmp_path / "fresh.safetensors")
    fresh(one_folder, path)
    assert pool2.run(fresh, one_folder, path) == [0.0, 0.0]


def save_and_go_on(folder: str, path: str) -> dict:
    """What two ranks have after two more steps, whether they go on or come back from the checkpoint."""
    options = {"optimizer": {"name": "adamw", "lr": 1e-2}}
    engine = _engine(folder, **options)
    engine.forward_backward(_mine(engine), cross_entropy)
    engine.optim_step()
    engine.save(path, {"step": 1})
    ends = []
    again = _engine(folder, **options)
    extra = again.load(path)
    for one in (engine, again):
        for _ in range(2):
            one.forward_backward(_mine(one), cross_entropy)
            one.optim_step()
        ends.append(full_weights(one))
    return {"extra": extra, "same": all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])}


def load_at_one_rank(folder: str, path: str) -> None:
    _engine(folder, optimizer={"name": "adamw", "lr": 1e-2}).load(path)


def test_a_resumed_run_is_the_same_to_the_bit_and_another_rank_count_knows_the_base(pool2, one_folder, tmp_path):
    path = str(tmp_path / "checkpoint")
    for result in pool2.run(save_and_go_on, one_folder, path):
        assert result == {"extra": {"step": 1}, "same": True}
    load_at_one_rank(one_folder, path)


def average(folder: str) -> float:
    """lerp_ of a plain model towards an adapted one, against the mean of the weights; alpha / r is 2."""
    engine = _engine(folder)
    plain = ShardedModel.from_pretrained(f"{folder}/base", engine.config, engine.mesh, trainable=False, masters=True)
    weights = full_weights(engine)
    wanted = base_weights(engine)
    for name in engine.model.adapter.layers:
        a, b = (weights[name.replace(".weight", f".lora_{part}.weight")] for part in "AB")
        wanted[name] = weights[name].lerp(weights[name] + 2 * b @ a, 1 - 0.75**2)
    for _ in range(2):
        plain.lerp_(engine.model, 0.25)
    average = {n: p.detach().full_tensor() for n, p in plain.parameters().items()}
    assert average.keys() == wanted.keys()
    return max((average[n] - t).abs().max().item() for n, t in wanted.items())


def test_an_average_is_of_the_product(pool2, one_folder):
    assert max(pool2.run(average, one_folder)) < 1e-6


def fail_on_rank_1(folder: str, gather: str) -> dict:
    engine = _engine(folder, rollout={"gather": gather})
    before = full_weights(engine)
    caught = ""
    try:
        with engine.generating() as runner:
            runner.generate(PROMPTS[:1], GREEDY)
            if engine.rank == 1:
                raise MemoryError("no room")
            runner.generate(PROMPTS[:1], GREEDY)
    except (MemoryError, RuntimeError) as error:
        caught = type(error).__name__
    after = full_weights(engine)
    engine.forward_backward(_mine(engine), cross_entropy)
    return {
        "caught": caught,
        "same": all(torch.equal(after[n], t) for n, t in before.items()),
        "gradient": _errors(engine, folder),
        "norm": engine.optim_step()["grad_norm"] > 0,
    }


@pytest.mark.parametrize("gather", ["full", "stream"])
def test_an_error_while_generating_leaves_the_training_model_as_it_was(pool2, one_folder, gather):
    for result in pool2.run(fail_on_rank_1, one_folder, gather):
        assert result["caught"] in ("MemoryError", "RuntimeError")
        assert result["same"]
        assert result["gradient"] < 1e-5
        assert result["norm"]


def test_a_teacher_opened_with_the_students_config_has_no_adapter(one_folder):
    engine = _engine(one_folder)
    config = HybridConfig.model_validate(engine.config.model_dump())
    teacher = ShardedModel.from_pretrained(f"{one_folder}/base", config, engine.mesh, trainable=False)
    assert teacher.adapter is None
