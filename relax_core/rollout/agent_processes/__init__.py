"""Runs the programs that play episodes, each below a guard that ends all of its processes.

Start reading in `agent_process.py`; `agent_guard.py` is the guard, and `agent_tasks.py` defines tasks and results.
"""
