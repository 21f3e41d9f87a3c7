"""The parity certificate: do rollout and trainer agree on the probability of the tokens that were sampled?

Per policy token d = |log p_rollout - log p_train|, both at the rollout's temperature, without truncation or penalties, from the
same weights. The bounds are for a correct engine: beyond them the importance ratio of an on-policy loss is not 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybrid.engine import HybridEngine
from trainers.config import CertificateConfig
from trainers.data.batching import make_batches
from trainers.types import Rollout

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


def certify(
    engine: HybridEngine,
    rollouts: Sequence[Rollout],
    config: CertificateConfig,
    *,
    temperature: float,
    compute_dtype: str,
    micro_batch_tokens: int,
) -> Certificate:
    """Compare up to `config.max_sequences` sampled rollouts of all ranks, before any weight changes. Collective."""
    mine = [r for r in rollouts if any(s.source == "policy" for s in r.spans)]
    mine = mine[: -(-config.max_sequences // engine.world_size)]
    token_bound, mean_bound = DEFAULT_BOUNDS[compute_dtype]
    bound = config.bound or token_bound
    total = beyond = count = largest = 0.0
    for batch in engine.equalise(make_batches(mine, micro_batch_tokens)):
        trained = engine.score(batch, temperature=temperature)
        if batch.rollout_logprobs_raw is None or batch.on_policy is None:
            continue  # an empty one: this rank only takes part in the forward
        for value in (batch.rollout_logprobs_raw - trained.cpu())[batch.on_policy].abs().tolist():
            value = value if math.isfinite(value) else math.inf
            total, count, beyond, largest = total + value, count + 1, beyond + (value > bound), max(largest, value)
    total, count, beyond = engine.mesh.sum([total, count, beyond])
    (largest,) = engine.mesh.max([largest])
    return Certificate(
        num_tokens=int(count),
        mean=total / count if count else 0.0,
        max=largest,
        beyond=beyond / count if count else 0.0,
        bound=bound,
        mean_bound=config.mean_bound or mean_bound,
        every_token=config.bound is not None or compute_dtype == "float32",
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
