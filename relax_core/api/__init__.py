"""Defines the Python library of Relax: `relax_core.run` and `relax_core.load_run` (docs/api.md).

Start reading in `run.py`; `loaded_run.py` reads the results of a run.
"""
