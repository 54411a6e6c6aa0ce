"""The data bus: rollout and trainer exchange prompt groups through it, and the ledger records the end of every sample.

Start reading in `replay_buffer.py`, the state machine of the groups. `staleness.py` has the staleness rule, `ledger.py`
records how samples end, and `factory.py` starts the configured bus process.
"""
