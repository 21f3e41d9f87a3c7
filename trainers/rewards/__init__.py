"""What a response is worth: components by name, each weighted, timed and counted where it fails. No torch.

Rooms:
    config      RewardConfig: the name, weight and limits of one component
    builtin     functions of text, and of a response's length
    functions   `module:function` of the user
    remote      a reward server, over HTTP
    math_verify mathematical equality, in a process of its own (math_verify_worker)
    components  a RewardConfig to what scores rollouts
    rewards     all components over rollouts; their metrics
"""

from trainers.rewards.builtin import REWARDS
from trainers.rewards.components import resolve
from trainers.rewards.config import RewardConfig, from_name
from trainers.rewards.rewards import Rewards, Scores, reward_metrics

__all__ = ["REWARDS", "RewardConfig", "Rewards", "Scores", "from_name", "resolve", "reward_metrics"]
