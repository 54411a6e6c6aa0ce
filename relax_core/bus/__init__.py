"""The data bus: rollout and trainer exchange prompt groups here, and the ledger records how every sample ends.

Start reading in `state/bus_state.py`, the state machine; `factory.py` starts the bus process that the config names.
"""
