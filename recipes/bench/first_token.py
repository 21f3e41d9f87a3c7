"""A fresh process that loads a checkpoint and draws one token: `peers.startup` times it from outside."""

from __future__ import annotations

import time

from recipes.bench.peer_job import read_job, write_result


def main() -> None:
    from inference_v2 import InferenceEngine, SamplingParams

    job = read_job()
    engine = InferenceEngine.from_pretrained(job["model"], dtype=job["dtype"], device="cpu")
    engine.generate(job["prompts"], SamplingParams(max_new_tokens=1))
    write_result(("torch",), first_token_at=time.time())


if __name__ == "__main__":
    main()
