"""The processes of a run: one folder per kind of role. Each role is a Ray actor that runs a loop in a thread.

Start reading in `process/worker.py`, the base of all workers; `trainer/policy_trainer.py` is the train step.
"""
