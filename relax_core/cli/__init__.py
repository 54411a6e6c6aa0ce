"""Contains the commands of `relax`: dashboard, doctor, engines, eval, explain, list, notify, stall and trace.

There is one module per command. The code of runs is elsewhere. Start reading in ``listing.py``. Commands on model files
are in relax_core/tools/.
"""
