"""The ledger: every issued sample ends exactly once, as trained at a step or as dropped with a reason.

Start reading in `ledger.py`, the entries in memory; `journal.py` writes the events to SQLite, and `ledger_reader.py`
reads them.
"""
