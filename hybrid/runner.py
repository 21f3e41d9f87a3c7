"""How ranks generate side by side: the runner that `engine.generating()` yields, and the lock step of streamed weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from hybrid.exchange import hand_over
from hybrid.mesh import Mesh
from hybrid.queues import Queues
from hybrid.sharding import ShardedSource
from hybrid.shares import deal
from inference_v2.engine import InferenceEngine
from inference_v2.scoring import Scored
from inference_v2.types import Completion, EngineStats, Request, SamplingParams


class LockStep:
    """What ranks tell each other: one small all-reduce before each streamed step, and one when they leave.

    Every rank calls `agree` until all have left or one has failed; after that, nobody does.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.over = False

    def agree(self, *, pending: bool, inside: bool, failed: bool = False, gone_is_lost: bool = False) -> bool:
        """True if any rank has work. Raises RuntimeError naming the other ranks that failed (with `gone_is_lost` also those that
        have left)."""
        table = self.mesh.table([pending, inside, failed])
        lost = [rank for rank, row in enumerate(table) if row[2]]
        self.over = bool(lost) or not any(row[1] for row in table)
        if lost and not failed:
            raise RuntimeError(f"generation failed on rank {', '.join(map(str, lost))}; its own error says why")
        gone = [rank for rank, row in enumerate(table) if not row[1]]
        if gone and gone_is_lost:
            raise RuntimeError(f"rank {', '.join(map(str, gone))} left generation; every rank must generate together as often")
        return not lost and any(row[0] for row in table)

    def meet(self) -> None:
        """Wait for every rank to come here. Raises RuntimeError where one failed or left instead."""
        self.agree(pending=False, inside=True, gone_is_lost=True)

    def fail(self) -> None:
        """This rank has failed: the others hear of it, unless all is over already."""
        if not self.over:
            self.agree(pending=False, inside=False, failed=True)


class Runner:
    """What `engine.generating()` yields: the generator with this rank's share of the prompts.

    Where layers are streamed, `step` (and so `generate` and `score`) is collective: a rank calls it until `has_work` is False on
    all.
    """

    def __init__(
        self, engine: InferenceEngine, lock_step: LockStep, source: ShardedSource | None, name: str | None = None
    ) -> None:
        """`name`: of this stay, unlike any other's in the process group's life; None: nothing is taken over from other ranks."""
        self._engine = engine
        self._lock_step = lock_step
        self._mesh = lock_step.mesh
        self._source = source  # None: nothing is gathered in a step
        self._name = name
        self._num_together = 0
        self._kept: list[Completion] = []  # finished while a verb waited for others
        self.idle_s = 0.0  # spent waiting for other ranks, with nothing left to compute

    def add(self, request: Request) -> int:
        return self._engine.add(request)

    def abort(self, request_id: int) -> None:
        self._engine.abort(request_id)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    @property
    def has_work(self) -> bool:
        """Of this rank."""
        return self._engine.has_work

    def step(self) -> list[Completion]:
        """Advance every running request by a step; the samples that finished."""
        kept, self._kept = self._kept, []
        if self._source is None:
            return kept + self._engine.step()
        return kept + self._pass() if self._lock_step.agree(pending=self.has_work, inside=True) else kept

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, keys: Sequence[int] | None = None
    ) -> list[list[Completion]]:
        """Per prompt its samples in order. `keys` name the prompts for the randomness (None: their place in the list)."""
        if self._source is None:
            return self._engine.generate(prompts, sampling, keys)
        numbers = range(len(prompts)) if keys is None else keys
        ids = [self.add(Request(tuple(p), sampling, key)) for p, key in zip(prompts, numbers, strict=True)]
        found: dict[int, list[Completion]] = {i: [] for i in ids}
        self._in_lock_step(found)
        return [sorted(found[i], key=lambda c: c.sample_index) for i in ids]

    def generate_together(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, keys: Sequence[int] | None = None
    ) -> dict[int, list[Completion]]:
        """The samples of this rank's share of `prompts`, which are those of all ranks and the same on each, by place in the list.

        Ranks begin with equal shares of the expected work; where the runner steals, one that has room takes over whole requests
        that another has not started. Afterwards samples are dealt by their tokens, so that every rank goes on with as much as the
        others; the shares do not depend on who computed what. Collective: every rank calls it as often.
        """
        keys = range(len(prompts)) if keys is None else keys
        if self._mesh.world_size == 1:
            return dict(enumerate(self.generate(prompts, sampling, keys)))
        work = [len(prompt) + sampling.num_samples * sampling.max_new_tokens for prompt in prompts]
        parts = deal(work, self._mesh.world_size)
        self._num_together += 1
        queues = None
        if self._name is not None:
            requests = [Request(tuple(prompt), sampling, key) for prompt, key in zip(prompts, keys, strict=True)]
            longest_first = [sorted(part, key=lambda i: (-work[i], i)) for part in parts]
            name = f"{self._name}/{self._num_together}"
            queues = Queues(longest_first, self._mesh.rank, dist.distributed_c10d._get_default_store(), name)
            computed = self._work_off(requests, queues)
        else:
            mine = parts[self._mesh.rank]
            computed = dict(zip(mine, self.generate([prompts[i] for i in mine], sampling, [keys[i] for i in mine]), strict=True))
        started = time.perf_counter()
        self._lock_step.meet()
        self.idle_s += time.perf_counter() - started
        if queues is not None:
            queues.close()
        return hand_over(self._mesh, computed, prompts)

    def score(self, sequences: Sequence[Sequence[int]], **what: Any) -> list[Scored]:
        """`InferenceEngine.score` of this rank's sequences. Collective where layers are streamed."""
        if self._source is None:
            return self._engine.score(sequences, **what)
        jobs = self._engine.add_scores(sequences, **what)
        self._in_lock_step({})
        return [job.scored for job in jobs]

    def leave(self) -> None:
        """Stay in step with the ranks that still generate. Raises RuntimeError if another rank failed."""
        started = time.perf_counter()
        while not self._lock_step.over:
            if self._lock_step.agree(pending=False, inside=False) and self._source is not None:
                self._pass()
        self.idle_s += time.perf_counter() - started

    # -- lock step

    def _in_lock_step(self, found: dict[int, list[Completion]]) -> None:
        """Pass after pass until no rank has work; what finished goes to `found`, by request, or is kept."""
        while True:
            started, has_work = time.perf_counter(), self.has_work
            if not self._lock_step.agree(pending=has_work, inside=True):
                return
            self._sort(self._pass(), found)
            if not has_work:
                self.idle_s += time.perf_counter() - started

    def _pass(self) -> list[Completion]:
        """One step in which every rank gathers every layer once, whatever becomes of this rank's own work."""
        assert self._source is not None
        self._source.opened = 0
        try:
            if self.has_work:
                return self._engine.step()
            self._engine.idle_step()
            return []
        finally:
            for prefix in ("", *self._source.prefixes, "")[self._source.opened :]:
                with self._source.scope(prefix):
                    pass

    def _sort(self, completions: Sequence[Completion], found: dict[int, list[Completion]]) -> None:
        for completion in completions:
            found.get(completion.request_id, self._kept).append(completion)

    # -- requests that go to whoever has room

    def _work_off(self, requests: Sequence[Request], queues: Queues) -> dict[int, list[Completion]]:
        """What this rank came to compute of `requests`, by place."""
        found: dict[int, list[Completion]] = {}  # by request id
        place: dict[int, int] = {}
        unfinished = 0  # samples
        while True:
            for i in self._claim(requests, queues, unfinished):
                request_id = self.add(requests[i])
                place[request_id], found[request_id] = i, []
                unfinished += requests[i].sampling.num_samples
            if not unfinished:
                return {place[r]: sorted(samples, key=lambda c: c.sample_index) for r, samples in found.items()}
            completions = self._engine.step()
            unfinished -= sum(c.request_id in found for c in completions)
            self._sort(completions, found)

    def _claim(self, requests: Sequence[Request], queues: Queues, unfinished: int) -> list[int]:
        """Requests to start now: at most a step's worth of prompts, while no sample waits for a seat or for KV blocks. Without
        room the rank opens what is left of its queue to the others; with room and nothing left it looks at theirs."""
        config = self._engine.config
        seats = 0 if self.stats().waiting else config.max_running - unfinished
        size = max((r.sampling.num_samples for r in requests), default=1)
        budget, claimed = config.max_step_tokens, list[int]()
        while budget > 0:
            if seats < size and (unfinished or claimed):
                queues.open()
                return claimed
            if (i := queues.claim()) is None:
                break
            claimed.append(i)
            seats -= size
            budget -= len(requests[i].prompt_ids)
        return claimed or queues.steal(max(1, seats // size))
