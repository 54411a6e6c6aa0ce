"""Makes the lanes of a run over time from its records: trainer, ranks, rollout workers, engines, pushes of weights.

Start reading in `run_timeline.py`.
"""
