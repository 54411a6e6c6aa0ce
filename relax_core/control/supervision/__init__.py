"""Contains the supervisor process, which forks the controller of a run and starts it again when it dies.

Start reading in `supervisor.py`.
"""
