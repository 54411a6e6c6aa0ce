"""The HTTP gateway of a run, and the orders that it hands to the controller; without Ray and without torch.

Start reading in ``order_book.py``.
"""
