"""Conversations: the policy's turns, and between them what an environment (a tool, a checker) answers.

Rooms:
    config         EnvironmentConfig, the YAML's `rollout.environment` (no torch)
    environment    Environment, Reply
    registry       environments by name
    calculator     answers arithmetic that the policy asks for
    verifier       lets the policy try again
    messages       an environment's text to ids, with the chat template's turn markers
    conversations  prompts -> rollouts of several turns
"""
