"""The backend bus=transfer_queue: the library TransferQueue stores the payloads, the bus process keeps the state.

Start reading in `transfer_queue_bus.py`, the client.
"""
