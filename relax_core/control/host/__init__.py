"""Manages what a run uses on its machine: its Ray, temporary folders, locks, and the processes that it has to kill.

Start reading in `ray_session.py` and `run_paths.py`; `stale_runs.py` removes the remains of killed runs.
"""
