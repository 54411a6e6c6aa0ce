"""Tells somebody what happens to a run: rules on its numbers, one message for a cause, and their delivery.

Start reading in `alarm_book.py`.
"""
