"""Runs agents, the programs that play episodes. The guard of an agent ends all processes of the agent.

Start reading in `agent_process.py`; `agent_guard.py` is the guard, and `agent_tasks.py` defines tasks and results.
"""
