"""Serves the embedded engine over HTTP: SGLang's routes and Relax's own, request bodies, replies, and their limits.

Start reading in ``application.py``, which routes each request.
"""
