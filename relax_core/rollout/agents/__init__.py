"""Serves agents over HTTP: a program with its own loop, tools and memory plays an episode.

Start reading in `conversation_tree.py`, which maps the messages of a request to the tokens that were sampled.
"""
