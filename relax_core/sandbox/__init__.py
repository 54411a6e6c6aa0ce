"""Runs Python code that a model wrote, and worker processes, in a sandbox of bubblewrap; it imports nothing of Relax.

Start reading in `run_code.py`; `inside_sandbox.py` is the program in its sandbox, and `worker_sandbox.py` the sandbox
of isolated rewards.
"""
