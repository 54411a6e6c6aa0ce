"""The processes of a run. Each role is a Ray actor that runs a loop in a thread.

Start reading in `worker.py`, the base class of all workers; `trainer/policy_trainer.py` has the train step.
"""
