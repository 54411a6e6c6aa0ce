"""Runs foreign code in child processes that can be killed: rewards of users, and decoders of images and videos.

Start reading in `killable_process.py`; `worker_pipe.py` is the side of the child.
"""
