"""Runs the episodes of isolated environments in worker processes.

Start reading in `env_workers.py`; `env_worker_main.py` runs in the worker process.
"""
