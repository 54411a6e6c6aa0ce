"""Checks what plug-ins return where it enters; `relax_core.registry` returns only checked plug-ins.

Start reading in `checked.py`; `checked_data.py` checks the rows of data sources.
"""
