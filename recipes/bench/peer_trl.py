"""Peer: TRL's DistillationTrainer on a CPU, under its own interpreter (`--peer-python`): python3.11 -m venv VENV &&
VENV/bin/pip install torch==2.13.0 trl

Its generation is transformers' `generate`; gradient checkpointing is off, which is faster and takes more memory.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer

from recipes.bench.peer_job import read_job, write_result


class StepTimes(TrainerCallback):
    """Seconds from the begin of a step (after its batch was taken) to its end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.first_end = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)
        self.first_end = self.first_end or time.time()


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    count, steps = job["num_prompts"], 1 + job["repeats"]
    rows = [{"prompt": prompt} for prompt in itertools.islice(itertools.cycle(job["prompts"]), count * steps)]
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        config = DistillationConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=count,
            gradient_accumulation_steps=1,
            max_completion_length=job["new_tokens"],
            generation_kwargs={"min_new_tokens": job["new_tokens"]},
            bf16=job["dtype"] == "bfloat16",
            beta=1.0,  # reverse KL
            learning_rate=1e-6,
            gradient_checkpointing=False,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
        )
        DistillationTrainer(
            model=job["model"],
            teacher_model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"])),
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
            callbacks=[times],
        ).train()
    packages = ("torch", "transformers", "trl")
    tokens = count * job["new_tokens"]
    write_result(packages, seconds=times.seconds[1:], tokens=tokens, first_token_at=times.first_end)


if __name__ == "__main__":
    main()
