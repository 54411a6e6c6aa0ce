"""Contains agent programs that play the episodes of an environment, in the Python interpreter agent.python.

Start reading in `verifiers_program.py`.
"""
