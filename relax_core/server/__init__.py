"""HTTP servers: the gateway of a run, which takes orders, and the page about runs, which changes nothing in a run.

It imports neither Ray nor torch. Start reading in `page_routes.py` and `order_routes.py`; the page is in ``static/``.
"""
