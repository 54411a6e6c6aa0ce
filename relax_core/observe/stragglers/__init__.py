"""Names the ranks, engines and reward workers that are slower than their equals, by pure functions on their times.

Start reading in `slow_equals.py`; `straggler_watch.py` applies it to a run that goes on.
"""
