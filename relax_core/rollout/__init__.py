"""The rollout: prompts become episodes with rewards, and complete groups of token trees go to the bus.

Start reading in `rollout_loop.py`. This folder does not import Ray: `relax_core.roles.rollout_worker` runs the rollout
in a process.
"""
