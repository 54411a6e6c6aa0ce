"""Plans a run before its processes start: processes, placement, batches, memory.

Start reading in `build_plan.py`. This package imports neither torch nor Ray.
"""
