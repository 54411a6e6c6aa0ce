"""The terminal of a run: the panel while it goes on, the report at its end, and standard streams that do not block.

Start reading in `panel.py`.
"""
