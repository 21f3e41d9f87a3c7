import json

from trainer_cases import tiny_folder
from transformers import AutoModelForCausalLM

from recipes import minimal_ppo


def test_the_minimal_script_raises_the_reward(tmp_path):
    tiny_folder(tmp_path / "policy")
    rows = [json.dumps({"prompt": f"{a}=", "answer": "7"}) for a in range(10)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    paths = [str(tmp_path / name) for name in ("policy", "prompts.jsonl", "out")]
    options = "--steps 16 --prompts-per-step 8 --samples 8 --max-new-tokens 1 --lr 1e-2".split()
    rewards = minimal_ppo.main([*paths, *options])
    assert sum(rewards[-3:]) > 0.9 + sum(rewards[:3])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "qwen3"
