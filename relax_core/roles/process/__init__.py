"""What every role's process has: its loop and status, its discovery of other processes, its placement, its log.

Start reading in `worker.py`.
"""
