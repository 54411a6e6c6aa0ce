"""Defines the keys of large sections of the configuration, each in a file; `relax_core/config/schema.py` has the root.

Start reading in `agent_schema.py`.
"""
