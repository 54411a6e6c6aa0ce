"""The trainer: the policy's ranks, the critic, checkpoints, and the weights' way to the engines.

Start reading in `policy_trainer.py`, the train step.
"""
