"""Holds the parsers of tool calls, one file for each form in which models write them, and the check of a chat template.

Start reading in `tool_parsers.py`.
"""
