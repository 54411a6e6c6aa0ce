"""The trainer, and the workers with a model that add columns to its groups: critic, reference, actor_fwd, teacher.

Start reading in `policy_trainer.py`, the train step, then `column_worker.py`, the loop of the other workers.
"""
