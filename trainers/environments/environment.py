"""What an environment is. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trainers.types import LARGEST_REWARD


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment says to a turn of the policy. `text` goes into the conversation and the policy speaks again; None ends
    it. `reward` is added to the conversation's. Raises ValueError for a text or a reward of another type, or not finite."""

    text: str | None
    reward: float = 0.0

    def __post_init__(self) -> None:
        if self.text is not None and not isinstance(self.text, str):
            raise ValueError(f"reply: text={self.text!r:.80}; allowed: text, or None to end the conversation")
        try:
            (self.text or "").encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"reply: text={self.text!r:.80}: {error.reason}; allowed: text that UTF-8 can hold") from None
        reward = float(self.reward)
        if not abs(reward) <= LARGEST_REWARD:
            raise ValueError(f"reply: reward={reward}; allowed: a finite number, up to {LARGEST_REWARD:g}")
        object.__setattr__(self, "reward", reward)  # frozen for everybody else


class Environment(Protocol):
    """One conversation's other side: made for it as `Class(prompt, **settings)`, and asked after each turn of the policy.

    It may have an attribute `stop`, of the instance or of its class: strings that end a turn of the policy, beside those of the
    sampling. It runs in threads, beside those of other conversations; what it raises there ends its conversation, not the run.
    """

    def reply(self, text: str, ids: tuple[int, ...], finish_reason: str) -> Reply:
        """To the turn `ids`, of which `text` leaves out special tokens only: a stop string that ended it is in both, with
        whatever else its last token holds. `finish_reason` "length": the turn was cut, and no message can follow; the reward
        counts."""
        ...
