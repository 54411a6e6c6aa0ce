"""The rollout role: the process that runs `relax_core.rollout` and the evaluations.

Start reading in `rollout_worker.py`.
"""
