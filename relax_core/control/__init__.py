"""The control plane starts a run's services, monitors and recovers them, and ends the run. No train step waits for it.

Start reading in `supervisor.py`, the process that the user starts, and then in `local_run.py`.
"""
