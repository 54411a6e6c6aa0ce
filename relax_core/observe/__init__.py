"""Records the events of a run's processes in one event log, and shows them on the terminal, in files and trackers.

Start reading in `event_log.py`; `panel.py` shows a run in progress.
"""
