"""A checker that lets the policy try again. No torch."""

from __future__ import annotations

from trainers.environments.environment import Reply
from trainers.rewards import REWARDS, resolve
from trainers.types import Prompt


class Verifier:
    """Each turn of the policy is scored by `reward` (a name, as in eval.reward). At `enough` or more the conversation ends; below
    it the policy is told `wrong` and may try again, `retries` times. The rewards add up to the last turn's score, less
    `retry_cost` for every turn after the first."""

    def __init__(
        self,
        prompt: Prompt,
        *,
        reward: str = "exact_match",
        enough: float = 1.0,
        retries: int = 1,
        wrong: str = "\nWrong, try again.\n",
        retry_cost: float = 0.0,
    ) -> None:
        """Raises ValueError for an unknown reward, a setting of another type, and a row without the answer that a built-in reward
        needs."""
        if not isinstance(retries, int) or retries < 0 or not isinstance(wrong, str):
            raise ValueError(f"verifier: retries={retries!r}, wrong={wrong!r}; allowed: an integer of 0 or more, and text")
        self._reward = resolve(reward)
        if reward in REWARDS:
            self._reward("", prompt)
        self._prompt, self._enough, self._retries, self._wrong, self._cost = prompt, enough, retries, wrong, retry_cost
        self._num_turns, self._total = 0, 0.0

    def reply(self, text: str, ids: tuple[int, ...], finish_reason: str) -> Reply:
        score = self._reward(text, self._prompt)
        total = score - self._cost * self._num_turns
        gained, self._total = total - self._total, total
        self._num_turns += 1
        if score >= self._enough or self._num_turns > self._retries:
            return Reply(None, gained)
        return Reply(self._wrong, gained)
