"""Starts a run's services, watches their health, recovers them, and ends the run; no train step waits for this package.

Start reading in `supervisor.py`, the process that the user starts, and then in `local_run.py`.
"""
