"""Micro-batches: packed sequences with named per-token fields, and the padded view that a HF module needs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """B sequences packed into T tokens; N of them are predicted positions that count in the loss.

    A *predicted position* t is a token whose logits come from token t - 1 of the same sequence. `loss_index` lists, for each
    counted position, the packed index of that previous token (where the hidden state is read); `targets` the predicted ids. The
    other [N, ...] fields are aligned with `loss_index`. Masks are made from recorded spans, never from `ids != pad`.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, 0 at each sequence's first token
    cu_seqlens: Tensor  # [B + 1] int64
    loss_index: Tensor  # [N] int64 into T
    targets: Tensor  # [N] int64
    sequence_index: Tensor  # [N] int64: which sequence of this batch a counted position belongs to
    response_index: Tensor | None = None  # [N] int64: 0 at its sequence's first counted position, then counting up
    rollout_logprobs: Tensor | None = None  # [N] fp32, as sampled (None: not from a rollout)
    rollout_logprobs_raw: Tensor | None = None  # [N] fp32, at the rollout's temperature, without truncation or penalties
    teacher_hidden: Tensor | None = None  # [N, H_teacher]
    on_policy: Tensor | None = None  # [N] bool: drawn from the policy (False: a given response)
    old_logprobs: Tensor | None = None  # [N] fp32, raw, of the policy before this step's first update
    reference_logprobs: Tensor | None = None  # [N] fp32, raw, of the reference policy
    advantages: Tensor | None = None  # [N] fp32
    mismatch_weights: Tensor | None = None  # [N] fp32: rollout/trainer correction; None: 1
    sequence_log_ratio: Tensor | None = None  # [N] fp32: mean log-ratio of the token's sequence under today's weights, detached
    values: Tensor | None = None  # [N] fp32, of the critic before this step's first update
    returns: Tensor | None = None  # [N] fp32: what the critic learns
    margins: Tensor | None = None  # [N] fp32: by how much a chosen response is better

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_targets(self) -> int:
        return self.targets.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in moved.items()})

    def select(self, start: int, stop: int) -> Batch:
        """The same sequences with only the counted positions [start, stop): what one chunk of the loss head sees."""
        whole = ("token_ids", "positions", "cu_seqlens")
        per_target = {f.name: v for f in fields(self) if f.name not in whole and (v := getattr(self, f.name)) is not None}
        return replace(self, **{name: v[start:stop] for name, v in per_target.items()})

    def misfit(self, *, rows: int, counted: int) -> ValueError | None:
        """Unless tokens are among the `rows` ids of an embedding and targets among the first `counted`: what is wrong."""
        for name, ids, limit in (("token_ids", self.token_ids, rows), ("targets", self.targets, counted)):
            low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
            if low < 0 or high >= limit:
                return ValueError(
                    f"{name} hold ids from {low} to {high}; allowed: 0 to {limit - 1}; check tokenizer, vocab_limit"
                )
        return None

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """(token_ids [B, L], position_ids [B, L], flat_index [T]): right padded with id 0; positions run on over the padding so
        that no module takes a reset for a new packed sequence. `flat_index[t]` is packed token t's place in the [B * L] view."""
        lengths = self.cu_seqlens.diff()
        longest = int(lengths.max()) if lengths.numel() else 0
        steps = torch.arange(longest, device=self.token_ids.device)
        position_ids = steps.expand(self.num_sequences, longest)
        keep = position_ids < lengths[:, None]
        flat_index = keep.reshape(-1).nonzero().squeeze(1)
        token_ids = torch.zeros(self.num_sequences, longest, dtype=torch.long, device=self.token_ids.device)
        token_ids.view(-1)[flat_index] = self.token_ids
        return token_ids, position_ids.contiguous(), flat_index
