"""Manages the resources of a run on its machine: Ray, temporary folders, locks, and processes of killed runs.

Start reading in `ray_session.py` and `run_paths.py`; `run_paths.py` also removes the remains of killed runs.
"""
