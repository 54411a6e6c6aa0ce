"""Serves the page of `relax dashboard`, which reads the folders of runs and changes nothing in them.

Start reading in `dashboard_app.py`; the page itself is in ``static/``.
"""
