"""Runs the tool servers of a run, and holds the sessions of episodes with these servers.

Start reading in `mcp_sessions.py`; `server_processes.py` starts the programs.
"""
