"""HTTP: the gateway of a run with its orders, and the page about runs, which changes nothing in their folders.

It imports neither Ray nor torch. Start reading in `page_routes.py` and `order_routes.py`; the page is in ``static/``.
"""
