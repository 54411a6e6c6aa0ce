"""The data bus: passes prompt groups from rollout to trainer, and records the end of every sample in a ledger.

Start reading in `replay_buffer.py`, the state machine of the groups. `staleness.py` implements the staleness rule,
`ledger.py` records how samples end, and `factory.py` starts the configured bus process.
"""
