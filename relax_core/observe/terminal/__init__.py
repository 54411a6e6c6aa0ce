"""Shows a run on the terminal: the panel, the report at its end, and standard streams that do not block.

Start reading in `panel.py`.
"""
