"""`hybrid_engine`: transformers' generate and the engine's agree, before and after steps, at every stage."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model
from training_cases import config, open_engine, whole
from transformers import PreTrainedModel

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}
# Padding on the left; the pad id is also a real one, and the second row has it inside.
IDS = torch.tensor([[0, 0, 5, 6, 7], [9, 10, 0, 12, 13]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
LABELS = IDS.masked_fill(MASK == 0, -100)


def settings(**keys: object) -> dict:
    section = {"enabled": True, "max_out_tokens": 40} | keys.pop("hybrid_engine", {})  # type: ignore[operator]
    return config(optimizer=ADAMW, hybrid_engine=section, **keys)


def hf_tokens(model: PreTrainedModel, count: int, eos: list[int]) -> list[list[int]]:
    rows = [row[keep.bool()][None] for row, keep in zip(IDS, MASK, strict=True)]
    call = {"max_new_tokens": count, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
    # with a mask: without one, transformers takes the pad id in the second row for padding
    found = [model.generate(row, attention_mask=torch.ones_like(row), **call)[0].tolist() for row in rows]
    longest = max(len(f) - len(r[0]) for f, r in zip(found, rows, strict=True))
    return [
        ids.tolist() + (f[len(r[0]) :] + [0] * longest)[:longest]
        for ids, f, r in zip(IDS, found, rows, strict=True)
    ]  # fmt: skip


def rollouts(family: str, given: dict) -> list[dict]:
    torch.manual_seed(0)
    engine = open_engine(given, tiny_model(family))
    copy = tiny_model(family)
    results = []
    for _ in range(3):
        with torch.no_grad():
            for name, p in engine.module.named_parameters():
                copy.get_parameter(name).copy_(whole(p))
        engine.eval()
        ours = engine.module.generate(IDS, attention_mask=MASK, max_new_tokens=8, pad_token_id=0, synced_gpus=True)
        engine.train()
        out = engine(input_ids=IDS, attention_mask=MASK, labels=LABELS)
        with torch.no_grad():
            expected = copy(input_ids=IDS, attention_mask=MASK, labels=LABELS)
        results.append(
            {
                "ours": ours.tolist(),
                "hf": hf_tokens(copy, 8, sorted(engine._rollouts.model.eos_token_ids)),
                "loss": abs(out.loss.item() - expected.loss.item()),
                "logits": (out.logits - expected.logits)[MASK.bool()].abs().max().item(),
            }
        )
        engine.backward(out.loss)
        engine.step()
    return results


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_rollouts_are_transformers_greedy_before_and_after_steps(pool2, family, stage):
    for results in pool2.run(rollouts, family, settings(stage=stage)):
        for step in results:
            assert step["ours"] == step["hf"]
            assert step["loss"] < 1e-5
            assert step["logits"] < 1e-4


def test_layer_by_layer_is_the_same(pool2):
    given = settings(hybrid_engine={"pin_parameters": False, "release_inference_cache": True})
    for results in pool2.run(rollouts, "llama", given):
        assert all(step["ours"] == step["hf"] for step in results)


def options() -> dict:
    torch.manual_seed(0)
    engine = open_engine(settings(ranks=1), tiny_model("llama"))
    draw = lambda **o: engine.generate(IDS, MASK, pad_token_id=0, **o)  # noqa: E731
    sampled = draw(do_sample=True, temperature=1.0, top_k=5, max_new_tokens=6, num_return_sequences=3, seed=1)
    return {
        "several": sampled.shape[0],
        "prompts": sampled[:3, :5].tolist() == [IDS[0].tolist()] * 3,
        "same seed": torch.equal(draw(max_new_tokens=4), draw(max_new_tokens=4)),
        "max_length": draw(max_length=9).shape[1] <= 9,
        "limit": draw().shape[1] <= 40,
        "stop": draw(max_new_tokens=8, eos_token_id=draw(max_new_tokens=1)[0, 5].item())[0, 5:].tolist(),
        "first": draw(max_new_tokens=1)[0, 5].item(),
    }


def test_the_arguments_of_generate():
    result = options()
    assert result["several"] == 6
    assert result["prompts"]
    assert result["same seed"]
    assert result["max_length"]
    assert result["limit"]
    assert result["stop"][0] == result["first"]
    assert set(result["stop"][1:]) == {0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"max_new_token": 3}, "max_new_token is unknown; nearest: max_new_tokens"),
        ({"max_new_tokens": 3, "max_length": 5}, "both given"),
        ({"attention_mask": torch.ones(2, 4)}, r"attention_mask of shape \[2, 4\]"),
        ({"attention_mask": torch.zeros(2, 5)}, "a prompt has no token"),
        ({"max_new_tokens": 99}, "generate: "),
        ({"max_new_tokens": 3, "do_sample": True, "top_p": 2.0}, "top_p"),
    ],
    ids=str,
)  # fmt: skip
def test_a_call_that_cannot_be_followed_is_refused(call, message):
    engine = open_engine(settings(ranks=1), tiny_model("llama"))
    with pytest.raises(ValueError, match=message):
        engine.generate(IDS, **({"attention_mask": MASK} | call))
    assert engine.generate(IDS, MASK, max_new_tokens=2).shape == (2, 7)  # and goes on


def test_without_the_section_generate_says_so():
    with pytest.raises(RuntimeError, match=r"needs hybrid_engine\.enabled"):
        open_engine(config(ranks=1), tiny_model("llama")).generate(IDS)


@pytest.mark.parametrize(
    "keys",
    [
        {"torch_autocast": {"enabled": True}},
        {"module_precision": [{"match": "norms"}]},
        {"zero_optimization": {"offload_param": {"device": "cpu"}}},
        {"data_types": {"optimizer_dtype": "param"}},
        {"communication_data_type": "bf16"},
        {"zero_optimization": {"zero_hpz_partition_size": 2}},
    ],
    ids=str,
)
def test_what_a_generating_model_cannot_do_is_refused(keys):
    with pytest.raises(ValueError, match="with hybrid_engine"):
        open_engine(settings(ranks=1, **keys), tiny_model("llama"))


def test_what_is_no_language_model_is_refused():
    with pytest.raises(ValueError, match="hybrid_engine with a Net; allowed: a causal LM"):
        open_engine(settings(ranks=1))


def test_training_flags_are_the_callers():
    model = tiny_model("llama")
    assert open_engine(settings(ranks=1), model.train()).module.training
    assert not open_engine(settings(ranks=1), tiny_model("llama").eval()).module.training
