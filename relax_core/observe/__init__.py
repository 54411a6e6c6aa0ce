"""Keeps what the processes of a run report in one event log, and shows it on the terminal, in results and trackers.

Start reading in `event_log.py`; `panel.py` shows a run in progress.
"""
