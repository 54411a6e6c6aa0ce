"""Runs Python code that a model wrote in a sandbox of bubblewrap; it imports nothing but the standard library.

Start reading in `run_code.py`; `inside_sandbox.py` is the program in the sandbox.
"""
