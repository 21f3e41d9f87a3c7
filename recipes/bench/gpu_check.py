"""One check of everything that needs a GPU, in under 8 minutes: `python recipes/bench/gpu_check.py [MODEL]` prints one JSON.

Stages: kernels against the reference; greedy tokens against transformers, with and without CUDA graphs; milliseconds of decode,
prefill, sampling and the swap. Each runs in a process of its own, so that a fault ends that stage alone. MODEL is a Hugging Face
folder for the timed stages; without one they use a random model of SmolLM2-135M's shape. Exit code 1 when a stage fails.

`--dry-run` goes through the stages on a CPU, tiny, with Triton's interpreter.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

BUDGET_S = 450.0
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "initializer_range": 0.15, "vocab_size": 96,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3": {"head_dim": 32}, "mistral": {"sliding_window": 12}, "exaone4": {"sliding_window": 8},
}  # fmt: skip
SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a Hugging Face folder to time")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU, through Triton's interpreter")
    parser.add_argument("--stage", choices=list(STAGES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        print(json.dumps(STAGES[args.stage](args)))
        return 0
    report: dict[str, Any] = {"command": "gpu_check", "dry_run": args.dry_run, "seconds": {}}
    start = time.monotonic()
    for name in STAGES:
        began = time.monotonic()
        report[name] = _run_stage(name, sys.argv[1:], args.dry_run, BUDGET_S - (began - start))
        report["seconds"][name] = round(time.monotonic() - began, 1)
    report["ok"] = all("error" not in report[name] and report[name].get("ok", True) for name in STAGES)
    print(json.dumps(report))
    return 0 if report["ok"] else 1


def _run_stage(name: str, arguments: list[str], dry_run: bool, seconds: float) -> dict[str, Any]:
    environment = {**os.environ, "TRITON_INTERPRET": "1" if dry_run else "0", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, __file__, *arguments, "--stage", name]
    limit = None if dry_run else max(1.0, seconds)
    try:
        found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {limit:.0f} s"}
    if found.returncode:
        return {"error": found.stderr[-2000:]}
    return json.loads(found.stdout.splitlines()[-1])


# -- stages, each in a process of its own -----------------------------------------------------------------------------------


def machine(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import triton

    found: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "device": "cpu"}
    if not args.dry_run:
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "bytes": properties.total_memory, "processors": properties.multi_processor_count}
    return found


def kernels(args: argparse.Namespace) -> dict[str, Any]:
    """Every kernel against the reference, in both dtypes."""
    import torch

    from inference_v2.kernels import triton_kernels
    from recipes.bench.kernel_checks import CASES, Setting, compare

    device = torch.device(_device(args))
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        setting = Setting(triton_kernels(device, dtype), device, dtype, small=args.dry_run)
        for name in CASES:
            found[f"{name}_{str(dtype).removeprefix('torch.')}"] = compare(name, setting)
    return {"ok": all(case["ok"] for case in found.values()), **found}


def tokens(args: argparse.Namespace) -> dict[str, Any]:
    """Greedy tokens in fp32 against transformers' generate, and sampled ones with graphs against those without."""
    import torch
    from transformers import AutoModelForCausalLM

    from inference_v2 import SamplingParams

    lengths, count = ((1, 9), 3) if args.dry_run else ((1, 4, 9, 10, 11, 16, 40), 40)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(2, 79, (n,), generator=generator).tolist() for n in lengths]
    found: dict[str, Any] = {}
    for family in ["llama"] if args.dry_run else FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            _new_model(Path(folder), family, TINY | FAMILIES[family] | ({"num_hidden_layers": 2} if args.dry_run else {}))
            module: Any = AutoModelForCausalLM.from_pretrained(folder)
            module.to(_device(args)).eval()
            want = []
            for prompt in prompts:
                ids = torch.tensor([prompt], device=module.device)
                with torch.no_grad():
                    answer = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
                want.append(answer[0, len(prompt) :].tolist())
            greedy = SamplingParams(temperature=0.0, max_new_tokens=count)
            drawn = SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=count, num_samples=1 if args.dry_run else 3)
            engines = [_engine(folder, args, "float32", cuda_graphs=graphs) for graphs in (True, False)]
            answers = [[list(group[0].token_ids) for group in engine.generate(prompts, greedy)] for engine in engines]
            sampled = [[c.token_ids for group in engine.generate(prompts, drawn) for c in group] for engine in engines]
            found[family] = {
                "greedy_as_transformers": answers[0] == want,
                "graphs_change_nothing": answers[0] == answers[1] and sampled[0] == sampled[1],
            }
    return {"ok": all(all(case.values()) for case in found.values()), **found}


def decode(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a decode step by rows, with and without graphs, at 64 to 128 tokens of context."""
    found: dict[str, Any] = {}
    with _timed_model(args) as folder:
        for graphs in (True, False):
            engine = _engine(folder, args, "bfloat16", cuda_graphs=graphs)
            for rows in (2,) if args.dry_run else (1, 16, 64, 256):
                steps = 2 if args.dry_run else 64
                prompts = [[3 + (i + j) % 50 for j in range(4 if args.dry_run else 64)] for i in range(rows)]
                whole, start = (_generate_seconds(engine, prompts, count, args) for count in (steps + 1, 1))
                step = (whole - start) / steps
                found[f"rows_{rows}_{'graphs' if graphs else 'eager'}"] = {"ms_per_step": 1e3 * step, "tokens_per_s": rows / step}
    return found


def prefill(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of 16 prompts of 1024, with nothing in the prefix cache."""
    count, length = (2, 5) if args.dry_run else (16, 1024)
    with _timed_model(args) as folder:
        engine = _engine(folder, args, "bfloat16", prefix_caching=False)
        prompts = [[3 + (7 * i + j) % 50 for j in range(length)] for i in range(count)]
        seconds = _generate_seconds(engine, prompts, 1, args)
    return {"ms": 1e3 * seconds, "tokens_per_s": count * length / seconds}


def sample(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of the sampler, beside the reference, and of attention with its bytes a second."""
    import torch

    from inference_v2.kernels import REFERENCE, triton_kernels
    from recipes.bench.kernel_checks import Setting, paged

    device = torch.device(_device(args))
    fast = triton_kernels(device, torch.bfloat16)
    found: dict[str, Any] = {}
    for rows, vocab in ((2, 300),) if args.dry_run else ((1, 49152), (64, 49152), (64, 151936)):
        logits = torch.randn(rows, vocab, device=device) * 3
        wide = torch.zeros(rows, dtype=torch.float64, device=device)
        for name, p in (("plain", 1.0), ("top_p", 0.9)):
            limits = (torch.ones(rows, device=device), wide + 0.5, wide.long(), wide + p, wide)
            for backend in (fast, REFERENCE):
                call = functools.partial(backend.sample, logits, None, *limits)
                found[f"sample_{rows}x{vocab}_{name}_{backend.name}_ms"] = 1e3 * _fastest(call, args)
    setting = Setting(fast, device, torch.bfloat16)
    for rows, context in ((2, 20),) if args.dry_run else ((1, 8192), (64, 2048), (256, 512)):
        given = paged(setting, [(1, context)] * rows, 9, 3, 64)
        seconds = _fastest(functools.partial(fast.paged_attention, *given, 0.125), args)
        found[f"attention_{rows}x{context}"] = {"ms": 1e3 * seconds, "gb_per_s": rows * context * 2 * 3 * 64 * 2 / seconds / 1e9}
    return found


def swap(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of train -> generate -> train, and the bytes that five of them leave behind."""
    import torch

    from hybrid import HybridEngine
    from hybrid.config import HybridConfig, RolloutConfig
    from inference_v2 import SamplingParams

    found: dict[str, Any] = {}
    with _timed_model(args) as folder:
        for on_leave in ("free", "keep"):
            config = HybridConfig(compute_dtype="bfloat16", device=_device(args), rollout=RolloutConfig(on_leave=on_leave))
            engine = HybridEngine.from_pretrained(str(folder), config)
            ledgers, held = [], []
            for _ in range(1 if args.dry_run else 6):
                engine.generate([[3, 4, 5]], SamplingParams(max_new_tokens=2, ignore_eos=True))
                ledgers.append(engine.ledger)
                held.append(0 if args.dry_run else torch.cuda.memory_allocated())
            spent = [ledger.enter_ms + ledger.leave_ms for ledger in ledgers if ledger is not None]
            found[on_leave] = {
                "ms": statistics.median(spent[1:] or spent),
                "first_ms": spent[0],
                "bytes_left": held[-1] - held[min(1, len(held) - 1)],
                "last": None if ledgers[-1] is None else dataclasses.asdict(ledgers[-1]),
            }
            engine.close()
    return found


STAGES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    stage.__name__: stage for stage in (machine, kernels, tokens, decode, prefill, sample, swap)
}


# -- what they share --------------------------------------------------------------------------------------------------------


def _device(args: argparse.Namespace) -> Literal["cpu", "cuda"]:
    return "cpu" if args.dry_run else "cuda"


def _engine(folder: str | Path, args: argparse.Namespace, dtype: str, **settings: Any) -> Any:
    from inference_v2 import InferenceEngine
    from inference_v2.config import EngineConfig

    cache_bytes = 2**24 if args.dry_run else 2**28 if dtype == "float32" else 2**32  # tiny models, and the one that is timed
    config = EngineConfig(kernels="triton", cache_bytes=cache_bytes, **settings)
    engine = InferenceEngine.from_pretrained(folder, dtype=dtype, config=config, device=_device(args))
    if args.dry_run:  # static buffers, though no graph
        engine._runner._static_decodes = config.cuda_graphs
    return engine


def _new_model(folder: Path, family: str, settings: dict[str, Any]) -> None:
    from trainers.config import NewModel
    from trainers.new_model import write_new_model

    characters = "".join(chr(0x100 + i) for i in range(settings["vocab_size"] - 2))  # logits end where the tokenizer does
    write_new_model(NewModel(architecture=family, characters=characters, settings=settings), folder)


def _timed_model(args: argparse.Namespace) -> Any:
    """A context with the folder of the model to time."""
    from contextlib import contextmanager, nullcontext

    @contextmanager
    def random_model() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            _new_model(Path(folder), "llama", TINY | {"num_hidden_layers": 1} if args.dry_run else SMOLLM2)
            yield folder

    return random_model() if args.model is None else nullcontext(args.model)


def _seconds(work: Callable[[], object], args: argparse.Namespace) -> float:
    import torch

    start = time.perf_counter()
    work()
    if not args.dry_run:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _generate_seconds(engine: Any, prompts: list[list[int]], new_tokens: int, args: argparse.Namespace) -> float:
    """The median of three runs after one that compiles and captures."""
    from inference_v2 import SamplingParams

    sampling = SamplingParams(temperature=1.0, max_new_tokens=new_tokens, ignore_eos=True)
    runs = [_seconds(lambda: engine.generate(prompts, sampling), args) for _ in range(2 if args.dry_run else 4)]
    return statistics.median(runs[1:])


def _fastest(work: Callable[[], object], args: argparse.Namespace) -> float:
    """Seconds of one call, from the best of five runs of many."""
    work()
    times = 1 if args.dry_run else 20
    return min(_seconds(lambda: [work() for _ in range(times)], args) / times for _ in range(1 if args.dry_run else 5))


if __name__ == "__main__":
    sys.exit(main())
