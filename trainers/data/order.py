"""Which prompts a step gets. Everything here is a function of (seed, epoch, offset): the same on every rank, on any number of
ranks, and after a resume. No torch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hybrid.shares import deal
from trainers.types import Prompt


def stable_hash(*parts: int | str) -> int:
    """63 bits that depend on `parts` only: not on the process, the platform or PYTHONHASHSEED."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True, slots=True)
class DataPosition:
    """The next prompt is number `offset` of the `epoch`-th pass over `num_prompts` (None: over however many there are)."""

    epoch: int = 0
    offset: int = 0
    num_prompts: int | None = None

    def to_json(self) -> dict[str, int | None]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DrawnPrompt:
    """A prompt in one pass. `key` names it for the engine's randomness: unique in a run, whatever the step size or rank count."""

    prompt: Prompt
    epoch: int

    @property
    def key(self) -> int:
        return stable_hash("prompt", self.epoch, self.prompt.index)


class PromptStream:
    """Passes over the prompts, each in an order of its own, handed out in global step batches. All ranks hold the same stream
    and take their share by `share`."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool, position: DataPosition = DataPosition()) -> None:
        """Raises ValueError if `position` is one in other data."""
        if position.num_prompts not in (None, len(prompts)):
            raise ValueError(
                f"data: there are {len(prompts)} prompts, and were {position.num_prompts} when the checkpoint was made; put the "
                "old data back, choose another output_dir, or start over with checkpoint.resume=never"
            )
        self.prompts, self.seed, self.shuffle, self.position = prompts, seed, shuffle, position
        self._order = self._permutation(position.epoch)

    def take(self, count: int) -> list[DrawnPrompt]:
        """The next `count` prompts; a new pass begins where one ends, also within a step."""
        drawn: list[DrawnPrompt] = []
        epoch, offset = self.position.epoch, self.position.offset
        while len(drawn) < count:
            if offset == len(self._order):
                epoch, offset = epoch + 1, 0
                self._order = self._permutation(epoch)
            step = self._order[offset : offset + count - len(drawn)]
            drawn += [DrawnPrompt(self.prompts[i], epoch) for i in step]
            offset += len(step)
        self.position = DataPosition(epoch, offset, len(self.prompts))
        return drawn

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(stable_hash("order", self.seed, epoch)).shuffle(order)
        return order


def share(items: Sequence, rank: int, world_size: int, work: Sequence[float] | None = None) -> list:
    """The items of a global step batch that belong to `rank`, in their order: dealt by the `work` expected of each (None: of all
    the same, so that they go round in turn). The union over ranks is the batch."""
    return [items[i] for i in deal([1.0] * len(items) if work is None else work, world_size)[rank]]


def coin(seed: int, step: int, probability: float) -> bool:
    """The step's coin of the on-/off-policy mix: equal on all ranks, since it is drawn from (seed, step) alone."""
    return random.Random(stable_hash("mix", seed, step)).random() < probability
