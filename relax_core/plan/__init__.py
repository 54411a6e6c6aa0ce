"""Computes what a run would be before anything starts: processes, placement, batches, memory.

Start reading in `build_plan.py`. Nothing here imports torch or Ray.
"""
