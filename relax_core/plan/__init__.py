"""Plans a run before anything starts: processes, placement, batches, memory.

Start reading in `build_plan.py`. Nothing here imports torch or Ray.
"""
