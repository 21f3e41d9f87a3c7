"""What a recipe says of an environment. No torch."""

from __future__ import annotations

from pydantic import Field, model_validator

from hybrid.config import Strict


class EnvironmentConfig(Strict):
    """`rollout.environment`: who answers the policy between its turns, and when a conversation ends.

    `sampling` counts per turn: its max_new_tokens, min_new_tokens, stop strings and stop ids. A turn that is cut by its length
    ends the conversation.
    """

    name: str = Field(description="calculator, verifier, or module:Class")
    settings: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="keyword arguments of the environment's class"
    )
    max_turns: int = Field(4, ge=1, description="turns of the policy in one conversation")
    max_response_tokens: int | None = Field(
        None, ge=1, description="of one conversation, the environment's tokens included; None: as many as the model takes"
    )
    role: str | None = Field(
        None,
        description="a role of the chat template (tool, user): the environment's messages get its turn markers, and the "
        "assistant's header after them; None: prefix and suffix instead",
    )
    prefix: str = Field("", description="text before each message of the environment; may name special tokens")
    suffix: str = Field("", description="text after it")
    timeout_s: float = Field(60.0, gt=0, description="an environment that takes longer to reply has failed")
    error_reward: float = Field(0.0, description="the reward of a conversation whose environment failed")

    @model_validator(mode="after")
    def _check(self) -> EnvironmentConfig:
        if self.role is not None and (self.prefix or self.suffix):
            raise ValueError(f"role={self.role!r} with prefix or suffix; allowed: the chat template's markers, or your own")
        return self
