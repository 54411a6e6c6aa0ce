"""Runs Python code that a model wrote, and worker processes, in a bubblewrap sandbox; it imports nothing else of Relax.

Start reading in `run_code.py`; `inside_sandbox.py` is the program inside its sandbox, and `worker_sandbox.py` the
sandbox of isolated rewards.
"""
