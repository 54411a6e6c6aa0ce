"""Finds processes of a run that died, froze or stall: workers, the bus, Ray's daemons and Serve's controller.

Start reading in `worker_health.py`; `watchdog.py` reports why no train step ends.
"""
