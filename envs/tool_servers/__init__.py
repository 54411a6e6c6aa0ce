"""Tool servers of a run, and the sessions of episodes with them.

Start reading in `mcp_sessions.py`; `server_processes.py` starts the programs.
"""
