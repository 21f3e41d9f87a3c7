"""What a step's rollouts look like, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.mesh import Mesh
from trainers.types import Rollout


def num_sampled(rollouts: Sequence[Rollout]) -> int:
    """Tokens that the policy drew."""
    return sum(span.stop - span.start for r in rollouts for span in r.spans if span.source == "policy")


def rollout_statistics(rollouts: Sequence[Rollout], mesh: Mesh) -> dict[str, float]:
    """Response lengths in tokens (an environment's left out), the share cut by the length limit, the share of 4-grams that a
    response had before, whether the responses were sampled, and the mean log-prob of sampled tokens: as sampled from, and raw (at
    the temperature, without truncation or penalties). Collective."""
    lengths = [r.num_response for r in rollouts]
    drawn = [(r, slice(s.start - r.num_prompt, s.stop - r.num_prompt)) for r in rollouts for s in r.spans if s.source == "policy"]
    grams = [repeats([r.ids[s.start : s.stop] for s in r.spans if s.source != "environment"]) for r in rollouts]
    local = [
        len(lengths),
        sum(lengths),
        sum(r.finish_reason == "length" for r in rollouts),
        sum(len(r.logprobs[cut]) for r, cut in drawn),
        sum(sum(r.logprobs[cut]) for r, cut in drawn),
        sum(sum(r.logprobs_raw[cut]) for r, cut in drawn),
        sum(repeated for repeated, _ in grams),
        sum(number for _, number in grams),
    ]
    count, tokens, truncated, sampled, logprob, logprob_raw, repeated, num_grams = mesh.sum(local)
    longest, minus_shortest = mesh.max([max(lengths, default=0), -min(lengths, default=2**31)])
    statistics = {
        "response_length_min": -minus_shortest if count else 0.0,
        "response_length_mean": tokens / max(count, 1.0),
        "response_length_max": longest,
        "truncated": truncated / max(count, 1.0),
        "repetition": repeated / max(num_grams, 1.0),
        "sampled": sampled / max(tokens, 1.0),
        "generated_tokens": sampled,
    }
    if sampled:
        statistics |= {"rollout_logprob": logprob / sampled, "rollout_logprob_raw": logprob_raw / sampled}
    return statistics


def repeats(turns: Sequence[Sequence[int]], n: int = 4) -> tuple[int, int]:
    """(n-grams that occurred before in the same response, n-grams)."""
    grams = [tuple(ids[i : i + n]) for ids in turns for i in range(len(ids) - n + 1)]
    return len(grams) - len(set(grams)), len(grams)
