"""Executes one run: its services, the controller that watches them, recovery from checkpoints, and its end.

Start reading in `local_run.py`; `recovery.py` executes the attempts and `controller.py` watches one attempt.
"""
