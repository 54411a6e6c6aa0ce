"""The data bus: rollout and trainer exchange prompt groups here, and the ledger records how every sample ends.

Start reading in `replay_buffer.py`, the state machine of the groups. `staleness.py` has the rule of the window,
`ledger.py` the ends of all samples, and `factory.py` starts the bus process that the configuration names.
"""
