import json

from tiny import save_tiny
from transformers import AutoModelForCausalLM

from recipes import minimal_opsd


def test_the_minimal_script_brings_a_student_closer_to_its_teacher(tmp_path):
    save_tiny(tmp_path / "student", "qwen3", seed=1)
    save_tiny(tmp_path / "teacher", "qwen3", seed=2)
    rows = [json.dumps({"prompt": f"{a}+{b}="}) for a in range(4) for b in range(4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    paths = [str(tmp_path / name) for name in ("student", "teacher", "prompts.jsonl", "out")]
    losses = minimal_opsd.main([*paths, "--steps", "12", "--prompts-per-step", "8", "--max-new-tokens", "6", "--lr", "5e-3"])
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "qwen3"
