"""Publishes weight versions and transfers them to the engines.

Start with `publisher.py`, then `transports.py`.
"""
