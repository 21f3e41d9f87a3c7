import json
from pathlib import Path

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


def test_the_example_in_readme_runs(tmp_path, monkeypatch):
    example = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    save_tiny("student", "qwen3", seed=1)
    save_tiny("teacher", "qwen3", seed=2)
    exec(compile(example, "README.md", "exec"), {})
    assert (tmp_path / "out" / "model.safetensors").is_file()
