"""Defines the keys of large sections of the configuration, each in a file; the schema beside this folder has the root.

Start reading in `agent_schema.py`.
"""
