"""Holds what Relax's own HTTP servers share: request bodies and answers, and bounds on connections.

Start reading in `asgi.py`.
"""
