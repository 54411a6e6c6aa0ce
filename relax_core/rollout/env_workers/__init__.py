"""Runs the episodes of isolated environments in worker processes.

Start reading in `env_workers.py`; `env_worker_main.py` is the side of the worker process.
"""
