"""Makes the optimizer updates of a train step.

Start with `updates.py`, then `pipeline_schedule.py` and `step_sums.py`.
"""
