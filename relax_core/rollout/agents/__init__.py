"""Serves agents over HTTP. An agent is a program with its own loop, tools and memory, and it plays episodes.

Start reading in `conversation_tree.py`, which maps the messages of a request to sampled tokens.
"""
