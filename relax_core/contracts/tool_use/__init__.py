"""Holds what an environment and a model say to each other about tools: schemas and calls.

Start reading in `tool_calls.py`.
"""
