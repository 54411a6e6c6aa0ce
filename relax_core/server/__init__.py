"""HTTP servers: a run's gateway, which scales engines and stops the run, and the dashboard, which only reads runs.

It imports neither Ray nor torch. Start reading in `page_routes.py` and `order_routes.py`; the page is in ``static/``.
"""
