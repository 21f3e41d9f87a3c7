"""Losses as pure functions of tensors.

`divergence`: teacher against student, per token. `token_loss`: per-token losses for `hybrid.loss_head.chunked_loss`.
`reductions`: the weight of each token and what their sum is divided by.
"""

from trainers.losses.token_loss import cross_entropy_token_loss, divergence_token_loss

__all__ = ["cross_entropy_token_loss", "divergence_token_loss"]
