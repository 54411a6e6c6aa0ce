"""Collects the records of a run, shows them on the terminal, and writes them to files and into results.

Start reading in `service/metrics_service.py`; `panel.py` shows a run in progress.
"""
