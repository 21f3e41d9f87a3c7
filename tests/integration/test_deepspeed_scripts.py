"""Training loops written for DeepSpeed run with only the import changed, on two ranks; its configs run unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "deepspeed_scripts"
CONFIGS = Path(__file__).parents[2] / "recipes" / "deepspeed"


def launch(*arguments: str | Path, ranks: int = 2) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", "0",
               "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", *map(str, arguments)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_script(name: str, folder: Path, *arguments: str | Path, ranks: int = 2) -> dict:
    """The script with another import, and nothing else."""
    source = (SCRIPTS / name).read_text()
    assert source.count("\nimport deepspeed\n") == 1
    (folder / name).write_text(source.replace("\nimport deepspeed\n", "\nimport hybrid as deepspeed\n"))
    return json.loads(launch(folder / name, *arguments, ranks=ranks).strip().splitlines()[-1])


@pytest.mark.parametrize(("stage", "precision"), [(0, {}), (2, {"fp16": {"enabled": True, "initial_scale_power": 8}})])
def test_a_tutorial_loop(tmp_path, stage, precision):
    config = {
        "train_batch_size": 32,
        "optimizer": {"type": "Adam", "params": {"lr": 0.002, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.002, "warmup_num_steps": 10}},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 5e7,
            "reduce_bucket_size": 5e7,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        **precision,
    }
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    arguments = ("--deepspeed", "--deepspeed_config", tmp_path / "ds_config.json", "--save_dir", tmp_path / "save")
    said = run_script("classifier.py", tmp_path, *arguments)
    assert said["last"] < 0.7 * said["first"]
    assert said["steps"] == 64
    assert said["stage"] == stage
    assert said["state"] == {"epochs": 8}
    assert said["lr"] == pytest.approx(0.002)


def test_fine_tuning_a_causal_lm(tmp_path):
    said = run_script("causal_lm.py", tmp_path, tmp_path / "out")
    assert said["accumulation"] == 2
    assert said["boundaries"] == said["steps"] == 20
    assert said["last"] < 0.5 * said["first"]
    assert said["held_out"] < said["first"]
    assert said["shape"] == [32]
    assert said["lr"] == [1e-2, 1e-2]
    assert said["norm"]
    assert said["saved"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_rlhf_with_a_hybrid_engine_and_a_reference(tmp_path):
    said = run_script("policy_gradient.py", tmp_path)
    assert said["last"] > said["first"] + 0.1
    assert said["kl_first"] < 0.2  # the reference is bf16
    assert said["kl_last"] > said["kl_first"]
    assert said["steps"] == 12
    assert said["ref_dtype"] == "torch.bfloat16"  # frozen, so without fp32 masters


@pytest.mark.parametrize(
    ("config", "options", "masters"),
    [
        ("zero3_offload.json", ["--steps", "2"], {"21 x float32 on cpu"}),
        ("fp16.json", ["--steps", "3"], {"21 x float32 on cpu"}),
        ("mixed_dtypes.json", ["--steps", "3", "--mixed"], {"21 x float32 on cpu"}),
    ],
)
def test_the_shipped_configs_run_and_say_what_each_key_does(config, options, masters):
    given = json.loads((CONFIGS / config).read_text())
    out = launch("-m", "recipes.deepspeed.train", CONFIGS / config, *options)
    described = [line.split()[0] for line in out.splitlines()]
    for key in _leaves(given):
        assert key in described
    losses = [float(line.split()[3].rstrip(",")) for line in out.splitlines() if line.startswith("step ")]
    assert losses[-1] < losses[0] + 0.05
    assert any(part in out for part in masters)
    assert "optimizer state: 42 x float32 on cpu" in out


def _leaves(given: dict, path: str = ""):
    for key, value in given.items():
        if isinstance(value, dict) and f"{path}{key}" != "optimizer.params":
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"
