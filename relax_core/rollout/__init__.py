"""The rollout: prompts become episodes with rewards, and complete groups of token trees go to the bus.

Start reading in `rollout_loop.py`. This folder imports no Ray; `relax_core.roles.rollout_worker` runs it in a process.
"""
