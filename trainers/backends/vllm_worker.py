"""The process that runs vLLM, under the interpreter that has it: weights and prompts in, completions out.

    python vllm_worker.py PARENT_PID FOLDER

It imports nothing of this project. Requests come as lines of JSON on standard input and are answered, one line each, on standard
output; whatever else is printed goes to standard error, the log. It ends when standard input does, or when its parent is gone,
and then removes FOLDER, which its parent made for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # this folder has a vllm.py of its own
    HERE = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != HERE]

WATCH_S = 0.5  # between two looks at whether the parent still lives
GREEDY_BELOW = 1e-5  # vLLM's own limit


class RolloutWorker:
    """Methods that vLLM adds to its worker (`worker_extension_cls`)."""

    model_runner: Any  # vLLM's

    def load_version(self, files: list[str], sent: dict[str, list[Any]]) -> None:
        """Loads the tensors of safetensors `files` in place. Raises ValueError, with nothing loaded, unless they are exactly
        those of `sent`: name -> [dtype, shape, SHA-256 of the bytes]."""
        from safetensors import safe_open

        tensors = {}
        for path in files:
            with safe_open(path, framework="pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        if difference := sorted(tensors.keys() ^ sent.keys()):
            raise ValueError(f"sent and received weights differ in {', '.join(difference[:3])}; nothing was loaded")
        for name, tensor in tensors.items():
            if describe(tensor) != sent[name]:
                raise ValueError(f"{name} is not what was sent (dtype, shape or SHA-256 differ); nothing was loaded")
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
        _process_shared(self.model_runner.get_model())

    def report_raw_logprobs(self) -> None:
        """Makes the sampler report, in the place of the most likely token's log-prob, log_softmax(z / temperature) of the sampled
        token: before penalties, forbidden ids and truncation. vLLM itself reports it either without the temperature or with the
        truncation."""
        import torch

        sampler = getattr(self.model_runner, "sampler", None)
        if not isinstance(sampler, torch.nn.Module):
            raise ValueError(f"this vLLM's sampler is {type(sampler).__name__}, no module; the worker is written for vLLM 0.32")
        kept: list[torch.Tensor] = []

        def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kept.clear()
            metadata = kwargs["sampling_metadata"]
            if metadata.max_num_logprobs is None:
                return
            z = kwargs["logits"].float()  # [R, V]
            temperature = metadata.temperature  # [R]; None where all are greedy
            if temperature is not None:
                z = z / torch.where(temperature < GREEDY_BELOW, 1.0, temperature)[:, None]
            kept.append(z.log_softmax(-1))

        def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if kept:
                raw = kept.pop().gather(-1, output.sampled_token_ids.long())  # [R, 1]
                output.logprobs_tensors.logprobs[:, 1:2] = raw
            return output

        sampler.register_forward_pre_hook(before, with_kwargs=True)
        sampler.register_forward_hook(after, with_kwargs=True)


def _process_shared(model: Any) -> None:
    """Lets the layers that share a weight make of it again what they run with: a reload does that for the layer alone under whose
    name the weight came, and on CPUs a tied head would go on with the old weights, packed."""
    layers: dict[int, list[Any]] = {}
    for layer in model.modules():
        for parameter in layer._parameters.values():
            if parameter is not None:
                layers.setdefault(id(parameter), []).append(layer)
    for sharing in layers.values():
        for layer in sharing if len(sharing) > 1 else ():
            if (method := getattr(layer, "quant_method", None)) is not None:
                method.process_weights_after_loading(layer)


def describe(tensor: Any) -> list[Any]:
    """[dtype, shape, SHA-256 of the bytes]."""
    import torch

    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), hashlib.sha256(data).hexdigest()]


class Service:
    """Answers requests. `version` is that of the weights it holds; None: they are no version's."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.version: int | None = None

    def start(self, **settings: Any) -> dict[str, Any]:
        import vllm

        self.llm = vllm.LLM(
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",  # nothing is taken from the checkpoint's
            logprobs_mode="processed_logprobs",
            worker_extension_cls=f"{__name__}.{RolloutWorker.__name__}",
            **settings,
        )
        self.llm.collective_rpc("report_raw_logprobs")
        return {"vllm": vllm.__version__}

    def load(self, version: int, files: list[str], sent: dict[str, list[Any]]) -> dict[str, Any]:
        self.version = None  # until all is loaded
        self.llm.collective_rpc("load_version", args=(files, sent))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache; the old weights' keys and values must not be used")
        self.version = version
        return {"version": version}

    def generate(
        self, version: int, prompts: list[list[int]], seeds: list[int], sampling: dict[str, Any], greedy: bool
    ) -> dict[str, Any]:
        """Per prompt its samples: [token ids, log-probs, raw log-probs]."""
        from vllm import SamplingParams

        if version != self.version:
            raise ValueError(f"asked for weight version {version}, this worker holds {self.version}; push the weights first")
        params = [
            SamplingParams(**sampling, seed=None if greedy else seed, logprobs=1, flat_logprobs=True, detokenize=False)
            for seed in seeds
        ]
        done = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        samples = [[_sample(output) for output in sorted(r.outputs, key=lambda o: o.index)] for r in done]
        return {"version": self.version, "samples": samples}


def _sample(output: Any) -> list[Any]:
    values = output.logprobs.logprobs
    ids = list(output.token_ids)
    if len(values) != 2 * len(ids):
        raise RuntimeError(f"vLLM gave {len(values)} log-probs for {len(ids)} tokens; the worker is written for vLLM 0.32")
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a sample for {output.finish_reason!r}")
    return [ids, values[0::2], values[1::2]]


def serve(requests: Iterable[bytes], answer: Callable[[dict[str, Any]], None]) -> None:
    service = Service()
    verbs: dict[str, Callable[..., dict[str, Any]]] = {
        "start": service.start,
        "load": service.load,
        "generate": service.generate,
    }
    for line in requests:
        request = json.loads(line)
        number = request.pop("number")
        verb = verbs[request.pop("verb")]
        try:
            result = verb(**request)
        except Exception as error:  # whatever it is: the parent raises it
            import traceback

            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        answer({"number": number, **result})


def leave(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # vLLM's threads are not waited for


def exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def watch(parent: int, folder: Path) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_S)
    leave(folder)


def main() -> None:
    parent, folder = int(sys.argv[1]), Path(sys.argv[2])
    if os.getppid() != parent:
        if not exists(parent):  # it was killed before this line was reached
            leave(folder)
        sys.exit(f"started by process {os.getppid()}, not by {parent}: give the interpreter itself, no program that starts it")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what vLLM prints is log
    threading.Thread(target=watch, args=(parent, folder), daemon=True).start()

    def answer(result: dict[str, Any]) -> None:
        answers.write(json.dumps(result).encode() + b"\n")
        answers.flush()

    with suppress(BrokenPipeError):  # the parent has gone while it waited
        serve(sys.stdin.buffer, answer)
    leave(folder)


if __name__ == "__main__":
    main()
