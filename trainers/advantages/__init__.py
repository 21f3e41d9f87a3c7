"""From scores and log-probs to the advantage of each token, as pure functions.

A response is a 1-D tensor over its *policy tokens*, the ones that the policy drew: an environment's tokens between them are not
in it, so t + 1 is the next policy token. In and out are fp32, sums are fp64. What is global takes `total`, which sums a list of
floats over all ranks (`hybrid.mesh.Mesh.sum`); every rank must call it, also one without responses.

    gae                      whiten(gae(token_rewards(score, ...), values, ...))
    grpo, dr_grpo, rloo      group_advantages(...), one number on every token of a response
    reinforce_pp             whiten(rewards_to_go(token_rewards(score, ...)))
    reinforce_pp_baseline    the same of the scores' group_advantages(...)

Rooms:
    estimators      rewards of tokens, GAE, group baselines
    kl              estimates of the KL to a reference; the coefficient that steers it
    mismatch        weights for rollouts of an engine whose log-probs are not the trainer's
    normalise       whitening, running moments, explained variance
"""

from trainers.advantages.estimators import all_equal, gae, group_advantages, rewards_to_go, token_rewards
from trainers.advantages.kl import AdaptiveKL, kl_estimate
from trainers.advantages.mismatch import mismatch_weights
from trainers.advantages.normalise import RunningMoments, Total, explained_variance, whiten

__all__ = [
    "AdaptiveKL",
    "RunningMoments",
    "Total",
    "all_equal",
    "explained_variance",
    "gae",
    "group_advantages",
    "kl_estimate",
    "mismatch_weights",
    "rewards_to_go",
    "token_rewards",
    "whiten",
]
