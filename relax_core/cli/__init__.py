"""The commands of `relax` other than runs: dashboard, doctor, engines, eval, explain, list, notify, stall and trace.

Each command has its own module; start reading in ``listing.py``. Commands on model files are in relax_core/tools/.
"""
