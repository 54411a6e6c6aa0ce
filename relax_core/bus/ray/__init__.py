"""The bus process as an asynchronous Ray actor, and its client. Payloads travel through Ray's object store.

Start reading in `ray_bus.py`, the client; `bus_actor.py` is the process.
"""
