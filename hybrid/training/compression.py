"""`gradient_compression`: of each gradient only the largest entries are sent; what is kept back is added to the next.

Top-k sparsification with error feedback (Stich, Cordonnier and Jaggi 2018, "Sparsified SGD with Memory", algorithm 1), in
place of the reduce-scatter of each FSDP2 group: every rank picks, of each part that another rank owns, the entries that are
largest in magnitude, and sends values and places by all-to-all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from hybrid.sharding import groups


class TopK(ReduceScatter):
    """A reduce-scatter of one group's gradients. `residual`: what this rank has not sent yet, of the size of the whole gradient.

    It is that of whole steps: `settle` says whether a step was taken; what a skipped one sent is kept as if it had not been, so
    that an infinity is forgotten with its step. sent_bytes and dense_bytes add up what went to other ranks, and what would have
    gone without compression.
    """

    def __init__(self, ratio: float, *, error_feedback: bool = True) -> None:
        self.ratio, self.error_feedback = ratio, error_feedback
        self.residual: Tensor | None = None
        self._pending: Tensor | None = None  # the residual if the step is taken
        self.sent_bytes = 0
        self.dense_bytes = 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """output [n] = the sum over ranks of what each sent of input [W * n]'s part for this rank."""
        ranks = dist.get_world_size(group)
        self.dense_bytes += input_tensor.nbytes * (ranks - 1) // ranks
        parts = input_tensor.view(ranks, -1)
        kept = max(1, math.floor(self.ratio * parts.shape[1]))
        if kept == parts.shape[1]:
            self.sent_bytes += input_tensor.nbytes * (ranks - 1) // ranks
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        before = self.residual if self._pending is None else self._pending
        if before is not None:
            parts = parts + before.view_as(parts)
        places = parts.abs().topk(kept, dim=1).indices.to(torch.int32)
        values = parts.gather(1, places.long())
        if self.error_feedback:
            left = parts.clone() if parts.data_ptr() == input_tensor.data_ptr() else parts
            self._pending = left.scatter_(1, places.long(), 0.0).flatten()
        got_values, got_places = torch.empty_like(values), torch.empty_like(places)
        dist.all_to_all_single(got_values, values.contiguous(), group=group)
        dist.all_to_all_single(got_places, places.contiguous(), group=group)
        self.sent_bytes += (values.nbytes + places.nbytes) * (ranks - 1) // ranks
        output_tensor.zero_()
        for one_values, one_places in zip(got_values, got_places, strict=True):  # in rank order, on every rank alike
            output_tensor.index_add_(0, one_places.long(), one_values)
        return None

    def settle(self, *, taken: bool) -> None:
        """The step that these gradients were for was taken, or not."""
        if taken and self._pending is not None:
            self.residual = self._pending
        self._pending = None


def compress(module: nn.Module, ratio: float, *, error_feedback: bool) -> list[TopK]:
    """Let each group below a sharded module reduce its gradients so."""
    made: dict[int, TopK] = {}
    for group in groups(module):
        state = id(group._get_fsdp_state())  # of several modules, where they are one group
        made.setdefault(state, TopK(ratio, error_feedback=error_feedback))
        group.set_custom_reduce_scatter(made[state])
    return list(made.values())
