"""The parity certificate: do rollout and trainer agree on the probability of the tokens that were sampled?

Per policy token d = |log p_rollout - log p_train|, without truncation or penalties. log p_train is read in the very forward pass
that trains, at the loss's temperature, so d also sees dropout, another temperature, and weights that changed since the rollout.
The bounds are for a correct engine: beyond them the importance ratio of an on-policy loss is not 1.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid.batch import Batch
from hybrid.loss_head import TokenLoss
from hybrid.mesh import Mesh
from trainers.config import CertificateConfig

logger = logging.getLogger(__name__)

# dtype: (per token, mean). bf16 is judged by the mean alone: single tokens of HF against itself differ by 0.36.
DEFAULT_BOUNDS = {"float32": (1e-4, 1e-4), "bfloat16": (0.5, 0.1)}


class CertificateError(RuntimeError):
    """Rollout and trainer disagree beyond the bound, and `certificate.action` is stop."""


@dataclass(frozen=True)
class Certificate:
    """Over all ranks. `beyond` is the share of tokens with d > `bound`; a d that is not finite is infinite and beyond."""

    num_tokens: int
    mean: float
    max: float
    beyond: float
    bound: float
    mean_bound: float
    every_token: bool  # whether a single token beyond the bound fails

    @property
    def holds(self) -> bool:
        return self.mean <= self.mean_bound and (not self.every_token or self.max <= self.bound)

    def metrics(self) -> dict[str, float]:
        return {"certificate_mean": self.mean, "certificate_max": self.max, "certificate_beyond": self.beyond}

    def __str__(self) -> str:
        return (
            f"|log p_rollout - log p_train| over {self.num_tokens} tokens: mean {self.mean:.3g} (bound {self.mean_bound:g}), "
            f"max {self.max:.3g} (bound {self.bound:g}), {self.beyond:.2%} of tokens beyond it"
        )


def is_due(config: CertificateConfig, step: int, *, first: bool) -> bool:
    """On the first rollout of a process, and every `config.every` steps."""
    return first or (config.every > 0 and step % config.every == 0)


class Certifier:
    """Collects one step's d while its loss is computed, then says whether they hold."""

    def __init__(self, config: CertificateConfig, *, temperature: float, compute_dtype: str) -> None:
        token_bound, mean_bound = DEFAULT_BOUNDS[compute_dtype]
        self.temperature = temperature
        self.bound, self.mean_bound = config.bound or token_bound, config.mean_bound or mean_bound
        self.every_token = config.bound is not None or compute_dtype == "float32"
        self._differences: list[float] = []  # of this rank

    def watch(self, token_loss: TokenLoss) -> TokenLoss:
        """`token_loss`, unchanged, that also shows its logits to the certificate."""

        def watched(logits: Tensor, chunk: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            assert chunk.rollout_logprobs_raw is not None
            assert chunk.on_policy is not None
            with torch.no_grad():
                z = logits / self.temperature  # [C, V]
                trained = z.gather(-1, chunk.targets[:, None]).squeeze(-1) - z.logsumexp(-1)
                self._differences += (chunk.rollout_logprobs_raw - trained)[chunk.on_policy].abs().tolist()
            return token_loss(logits, chunk)

        return watched

    def certificate(self, mesh: Mesh) -> Certificate:
        """Over all tokens of all ranks that were watched. Collective."""
        d = [value if math.isfinite(value) else math.inf for value in self._differences]
        total, count, beyond = mesh.sum([sum(d), len(d), sum(value > self.bound for value in d)])
        (largest,) = mesh.max([max(d, default=0.0)])
        return Certificate(
            num_tokens=int(count),
            mean=total / max(count, 1.0),
            max=largest,
            beyond=beyond / max(count, 1.0),
            bound=self.bound,
            mean_bound=self.mean_bound,
            every_token=self.every_token,
        )


def enforce(certificate: Certificate, config: CertificateConfig, step: int, *, rank: int = 0) -> None:
    """Raises CertificateError if it does not hold and the config says stop, on every rank; else rank 0 warns."""
    if certificate.holds:
        return
    message = f"step {step}: the parity certificate fails: {certificate}"
    if config.action == "stop":
        raise CertificateError(f"{message}; look for a numerics fault, or set certificate.action=warn")
    if rank == 0:
        logger.warning(message)
