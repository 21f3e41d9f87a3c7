"""InferenceEngine: continuous batching over a paged cache, behind the verbs add / step / abort / stats, generate and score."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path

import torch

from inference_v2.admission import Door
from inference_v2.blocks import Blocks
from inference_v2.cache import pool_sizes
from inference_v2.config import EngineConfig
from inference_v2.runner import DecoderLike, DrawnToken, Runner
from inference_v2.scheduler import Plan, Scheduler
from inference_v2.scoring import Scored, ScoreJob
from inference_v2.sequence import Sequence
from inference_v2.stopping import StopText, Tokenizer
from inference_v2.types import Completion, EngineStats, FinishReason, Request, SamplingParams
from inference_v2.weights import ModelWeights


class InferenceEngine:
    """Generates with one decoder and whatever version of its weights is set.

    Tokens and log-probs do not depend on what else runs: batching, chunking, prefix hits, preemption, forks. An error of one
    request ends that request (`Completion.error`) and no other. Not thread-safe.
    """

    def __init__(
        self,
        decoder: DecoderLike,
        weights: ModelWeights,
        *,
        config: EngineConfig | None = None,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Tokenizer | None = None,
        vocab_limit: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.decoder = decoder
        self.config = config = config or EngineConfig()
        self.tokenizer = tokenizer
        self.device = torch.device(device)
        self.dtype = dtype
        spec = decoder.spec
        self.max_model_len = config.max_model_len or spec.max_position_embeddings
        num_blocks = pool_sizes(
            spec,
            config.block_size,
            dtype,
            max_model_len=self.max_model_len,
            max_running=config.max_running,
            cache_bytes=config.cache_bytes,
        )
        blocks = Blocks(
            num_blocks, spec.windows, config.block_size, prefix_caching=config.prefix_caching, version=weights.version
        )
        self._runner = Runner(
            decoder, num_blocks, config.block_size, dtype, self.device,
            poison=config.debug_poison, cuda_graphs=config.cuda_graphs,
        )  # fmt: skip
        self._scheduler = Scheduler(blocks, config.max_running, config.max_step_tokens)
        self._door = Door(
            vocab_size=spec.vocab_size,
            num_drawable=min(spec.vocab_size, vocab_limit or spec.vocab_size),
            eos_token_ids=frozenset(eos_token_ids),
            max_model_len=self.max_model_len,
            has_tokenizer=tokenizer is not None,
        )
        self._weights = weights
        self._alive: dict[int, int] = {}  # request id -> samples not finished yet
        self._finished: list[Completion] = []  # for the next step() to return
        self._jobs: dict[int, ScoreJob] = {}
        self._next_id = 0
        self._num_arrivals = 0
        self._tokens_generated = 0

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | str = "float32",
        config: EngineConfig | None = None,
        device: str = "auto",
        tokenizer: str | Path | None = None,
        trust_remote_code: bool = False,
    ) -> InferenceEngine:
        """An engine over a Hugging Face folder or hub name, weights loaded. Raises ValueError for what cannot be served."""
        from inference_v2.loading import load_model  # the doors to transformers, which takes seconds to import
        from inference_v2.models.build import build_decoder, dtype_of

        config = config or EngineConfig()
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        elif torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device={device}, but torch finds no CUDA device; allowed here: auto, cpu")
        dtype = dtype_of(dtype)
        model = load_model(path, trust_remote_code=trust_remote_code, tokenizer=tokenizer)
        decoder, weights = build_decoder(model, config, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        return cls(
            decoder,
            weights,
            config=config,
            eos_token_ids=model.eos_token_ids,
            tokenizer=model.tokenizer,
            vocab_limit=model.vocab_limit,
            device=device,
            dtype=dtype,
        )

    # -- verbs -------------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> int:
        """Queue a request; returns its id. What cannot be served comes back from the next `step` as a completion with `error`
        (one a sample). Raises ValueError when `request.id` is alive already."""
        if request.id in self._alive or request.id in self._jobs:
            raise ValueError(f"request id={request.id} is in use; allowed: an id that no unfinished request has, or None")
        request_id = self._new_id() if request.id is None else request.id
        num_samples = request.sampling.num_samples
        self._alive[request_id] = num_samples
        leader, *forks = (self._sequence(request, request_id, request.first_sample + i) for i in range(num_samples))
        error = self._door.refusal(request) or self._scheduler.refusal(leader)
        if error is not None or request.sampling.max_new_tokens == 0:
            for seq in (leader, *forks):
                self._finish(seq, "length" if error is None else "abort", error=error)
            return request_id
        for seq in (leader, *forks):
            seq.stop_ids = self._door.stop_ids(request.sampling)
            if request.sampling.stop and self.tokenizer is not None:
                seq.stop_text = StopText(self.tokenizer, request.sampling.stop)
        leader.forks = forks
        self._scheduler.add(leader)
        return request_id

    def step(self) -> list[Completion]:
        """Compute at most `max_step_tokens` tokens; returns the samples that have finished. Without work it only returns."""
        self._follow_weights()
        plan = self._scheduler.schedule()
        if plan.chunks:
            drawn = self._runner.run(plan, self._weights, self._jobs)
            self._scheduler.commit(plan)
            for token in drawn:
                self._take(token)
            self._end_scores(plan)
        finished, self._finished = self._finished, []
        return finished

    def idle_step(self) -> None:
        """A forward without tokens: enters every scope of the weights, so that ranks that still decode can gather them."""
        self._runner.run(Plan(), self._weights, self._jobs)

    def abort(self, request_id: int) -> bool:
        """End a request; its samples come back from the next `step` with what they have. A score job keeps what it has, NaN
        elsewhere, and others go on. False if it is not alive."""
        removed = self._scheduler.abort(request_id)
        if self._jobs.pop(request_id, None) is not None:
            self._leave_trunk(request_id)
            return True
        for seq in removed:
            self._finish(seq, "abort")
        return bool(removed)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to compute or to return."""
        return bool(self._finished or self._scheduler.running or self._scheduler.waiting)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        counters = scheduler.counters
        return EngineStats(
            forwards=self._runner.num_forwards,
            prompt_tokens_prefilled=counters.prompt_tokens_prefilled,
            output_tokens_computed=counters.output_tokens_computed,
            tokens_hit=counters.tokens_hit,
            tokens_generated=self._tokens_generated,
            blocks_copied=counters.blocks_copied,
            preemptions=counters.preemptions,
            max_step_tokens=counters.max_step_tokens,
            blocks_free=scheduler.blocks.num_free,
            blocks_total=scheduler.blocks.num_total,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
        )

    def generate(
        self, prompts: Seq[Seq[int]], sampling: SamplingParams, keys: Seq[int] | None = None
    ) -> list[list[Completion]]:  # fmt: skip
        """Complete every prompt; per prompt its samples by sample index. `keys` name the prompts for the randomness (default:
        their place in the list). Completions of requests added before are kept for the next `step`."""
        if keys is not None and len(keys) != len(prompts):
            raise ValueError(f"generate: {len(keys)} keys for {len(prompts)} prompts; allowed: one key a prompt, or None")
        keys = range(len(prompts)) if keys is None else keys
        requests = [Request(tuple(prompt), sampling, key) for prompt, key in zip(prompts, keys)]  # all, before any is added
        ids = [self.add(request) for request in requests]
        results: dict[int, list[Completion]] = {i: [] for i in ids}
        self._run(ids, results)
        return [sorted(results[i], key=lambda completion: completion.sample_index) for i in ids]

    def score(
        self,
        sequences: Seq[Seq[int]],
        *,
        starts: Seq[int] | None = None,
        temperature: float = 1.0,
        logprobs: bool = True,
        hidden: bool = False,
    ) -> list[Scored]:
        """fp32 log_softmax(z / temperature) of each sequence's tokens from `starts` on (default 1; temperature 0 counts as 1).
        With `hidden`, also the final hidden states that predict them; without `logprobs`, those alone and no logits are formed.
        What sequences share before their last unscored token is computed once. Raises ValueError for a sequence that cannot be
        scored."""
        jobs = self.add_scores(sequences, starts=starts, temperature=temperature, logprobs=logprobs, hidden=hidden)
        self._run([job.request_id for job in jobs], {})
        return [job.scored for job in jobs]

    def add_scores(
        self,
        sequences: Seq[Seq[int]],
        *,
        starts: Seq[int] | None = None,
        temperature: float = 1.0,
        logprobs: bool = True,
        hidden: bool = False,
    ) -> list[ScoreJob]:
        """Queue what `score` does; the jobs are filled once `step` leaves no work."""
        if not 0.0 <= temperature < math.inf:
            raise ValueError(f"score: temperature={temperature}; allowed: finite and >= 0 (0 counts as 1)")
        starts = [1] * len(sequences) if starts is None else starts
        if len(starts) != len(sequences):
            raise ValueError(f"score: {len(starts)} starts for {len(sequences)} sequences; allowed: one a sequence, or None")
        queue: list[Sequence] = []
        for i, (ids, start) in enumerate(zip(sequences, starts)):
            seq = self._sequence(Request(tuple(ids), SamplingParams(max_new_tokens=0)), self._new_id(), 0)
            seq.score_start = start
            error = self._door.refusal(seq.request)
            if error is None and start not in range(1, len(seq.tokens) + 1):
                error = f"start={start}; allowed: 1 to {len(seq.tokens)}, the first token is predicted by none"
            error = error or self._scheduler.refusal(seq)
            if error is not None:
                raise ValueError(f"score: sequence {i}: {error}")
            queue.append(seq)
        jobs: list[ScoreJob] = []
        alike: dict[tuple[int, ...], list[Sequence]] = {}
        for seq, start in zip(queue, starts):
            count = len(seq.tokens) - start
            size = self.decoder.spec.hidden_size
            values = torch.full((count if logprobs else 0,), math.nan, device=self.device)
            states = torch.empty(count, size, dtype=self.dtype) if hidden else None
            jobs.append(ScoreJob(seq.request_id, start, temperature, Scored(values, states)))
            if count:
                self._jobs[seq.request_id] = jobs[-1]
                alike.setdefault(seq.request.prompt_ids[: start - 1], []).append(seq)
        for shared, seqs in alike.items():
            for seq in [self._trunk(seqs)] if shared and len(seqs) > 1 else seqs:
                self._scheduler.add(seq)
        return jobs

    def set_weights(self, weights: ModelWeights) -> None:
        """Use these weights from now on. A new version: running samples are recomputed, and no KV of another is ever read.
        Weights of the version in use must be equal to those in use."""
        self._weights = weights
        self._follow_weights()

    def release(self) -> None:
        """Drop the KV pool and all that is cached; what runs is recomputed in a new pool."""
        self._scheduler.restart(self._weights.version)
        self._runner.release()

    # -- one step ----------------------------------------------------------------------------------------------------------

    def _follow_weights(self) -> None:
        if self._weights.version != self._scheduler.blocks.version:
            self._scheduler.restart(self._weights.version)

    def _take(self, result: DrawnToken) -> None:
        """Append a drawn token; the sample goes on, starts as a fork, or ends."""
        seq, leader = result.seq, result.leader
        reason, text, error = self._append(result)
        if seq is leader:
            seq.forks = []
            if reason is not None:
                self._scheduler.finish(seq)
        elif reason is None:
            self._scheduler.fork(leader, seq)
        if reason is not None:
            self._finish(seq, reason, text=text, error=error)

    def _append(self, result: DrawnToken) -> tuple[FinishReason | None, str | None, str | None]:
        """(why the sample ends here, its text up to a stop string, its error), each None where there is none."""
        seq, sampling = result.seq, result.seq.request.sampling
        if not (math.isfinite(result.logprob) and math.isfinite(result.logprob_raw)):
            position, version = len(seq.tokens), self._weights.version
            return "abort", None, f"the logits of position {position} are not finite (weight version {version})"
        seq.append(result.token_id, result.logprob, result.logprob_raw, self._weights.version)
        self._tokens_generated += 1
        text = seq.stop_text.push(seq.output) if seq.stop_text is not None else None
        if seq.num_output >= sampling.min_new_tokens and (result.token_id in seq.stop_ids or text is not None):
            return "stop", text, None
        return ("length" if seq.num_output == sampling.max_new_tokens else None), None, None

    def _trunk(self, seqs: Seq[Sequence]) -> Sequence:
        """What comes before the last unscored token of `seqs`, which start as its forks."""
        first = seqs[0]
        assert first.score_start is not None, "a sequence that is scored"
        tokens = first.tokens[: first.score_start]  # the last one needs no forward
        trunk = Sequence(first.request, self._new_id(), 0, order=first.order, tokens=tokens, score_start=first.score_start)
        trunk.forks = list(seqs)
        return trunk

    def _leave_trunk(self, request_id: int) -> None:
        """A score job that waits for what it has in common with others waits no more; a trunk for nobody is not computed."""
        for seq in (*self._scheduler.running, *self._scheduler.waiting):
            if any(fork.request_id == request_id for fork in seq.forks):
                seq.forks = [fork for fork in seq.forks if fork.request_id != request_id]
                if not seq.forks:
                    self._scheduler.abort(seq.request_id)

    def _end_scores(self, plan: Plan) -> None:
        for chunk in plan.chunks:
            seq = chunk.seq
            if seq.score_start is None or not chunk.is_last:
                continue
            if not seq.forks:
                del self._jobs[seq.request_id]
            for fork in seq.forks:
                self._scheduler.fork(seq, fork)
            self._scheduler.finish(seq)

    # -- requests ----------------------------------------------------------------------------------------------------------

    def _new_id(self) -> int:
        while self._next_id in self._alive or self._next_id in self._jobs:
            self._next_id += 1
        self._next_id += 1
        return self._next_id - 1

    def _sequence(self, request: Request, request_id: int, sample_index: int) -> Sequence:
        self._num_arrivals += 1
        return Sequence(request, request_id, sample_index, order=self._num_arrivals, tokens=list(request.prompt_ids))

    def _finish(self, seq: Sequence, reason: FinishReason, *, text: str | None = None, error: str | None = None) -> None:
        self._alive[seq.request_id] -= 1
        if not self._alive[seq.request_id]:
            del self._alive[seq.request_id]
        if text is None and self.tokenizer is not None:
            text = self.tokenizer.decode(seq.output, skip_special_tokens=True)
        self._finished.append(seq.completion(reason, self._weights.version, text, error))

    def _run(self, ids: Seq[int], results: dict[int, list[Completion]]) -> None:
        """Step until these requests are done. Completions of others are kept; after an exception nothing of these is left."""
        others: list[Completion] = []
        try:
            while any(i in self._alive or i in self._jobs for i in ids) or self._finished:
                for completion in self.step():
                    results.get(completion.request_id, others).append(completion)
        finally:
            for i in ids:
                if i in self._alive or i in self._jobs:
                    self.abort(i)
            self._finished = others + [c for c in self._finished if c.request_id not in results]
