"""Programs that play the episodes of an environment by themselves, in the Python of agent.python.

Start reading in `verifiers_program.py`.
"""
