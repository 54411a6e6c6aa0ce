"""Contains two HTTP servers: the gateway of a run and the dashboard.

The gateway scales engines and stops the run. The dashboard only reads runs. This package imports neither Ray nor torch.
Start reading in `page_routes.py` and `order_routes.py`. The web page is in ``static/``.
"""
