"""The trainer, and the workers that compute columns of its groups with a model: critic, reference, actor_fwd, teacher.

Start reading in `policy_trainer.py`, the train step, then `column_worker.py`, the loop of workers that add columns.
"""
