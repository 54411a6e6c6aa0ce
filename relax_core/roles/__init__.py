"""The processes of a run: each role is a Ray actor that runs a loop in a thread.

Start reading in `worker.py`, the base of all workers; `trainer/policy_trainer.py` is the train step.
"""
