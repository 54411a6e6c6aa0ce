"""Records the events of a run in one event log, and shows them on the terminal, in files and in trackers.

Start reading in `event_log.py`; `panel.py` shows a run in progress.
"""
