"""Manages the resources of a run on its machine: its Ray, temporary folders, locks, and processes of killed runs.

Start reading in `ray_session.py` and `run_paths.py`; the latter also removes the remains of killed runs.
"""
