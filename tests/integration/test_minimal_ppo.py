import json
from pathlib import Path

import pytest
import torch
from trainer_cases import tiny_folder
from transformers import AutoModelForCausalLM

from recipes import minimal_ppo


def write_inputs(folder: Path) -> list[str]:
    tiny_folder(folder / "policy")
    rows = [json.dumps({"prompt": f"{a}=", "answer": "7"}) for a in range(10)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    return [str(folder / name) for name in ("policy", "prompts.jsonl", "out")]


def test_the_minimal_script_raises_the_reward(tmp_path):
    paths = write_inputs(tmp_path)
    options = "--steps 16 --prompts-per-step 8 --samples 8 --max-new-tokens 1 --lr 1e-2".split()
    rewards = minimal_ppo.main([*paths, *options])
    assert sum(rewards[-3:]) > 0.9 + sum(rewards[:3])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "qwen3"


@pytest.mark.parametrize("prompts", [3, 1])  # with 1, rank 1 answers nothing
def test_two_ranks_are_rewarded_as_one(tmp_path, pool2, prompts):
    """Of each step by the same tokens; a step that went wrong would draw others at the next."""
    policy, rows, out = write_inputs(tmp_path)
    options = ["--steps", "4", "--prompts-per-step", str(prompts), "--samples", "8", "--max-new-tokens", "3", "--lr", "1e-2"]
    expected = minimal_ppo.main([policy, rows, str(tmp_path / "one"), *options])
    first, second = pool2.run(minimal_ppo.main, [policy, rows, out, *options])
    assert first == second == pytest.approx(expected, abs=1e-9)
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "out"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-3)
