"""Runs Python code of a model, and worker processes, in a bubblewrap sandbox; imports no other package of Relax.

Start reading in `run_code.py`. `inside_sandbox.py` is the program that runs inside the sandbox of a model's code.
`worker_sandbox.py` is the sandbox of isolated rewards.
"""
