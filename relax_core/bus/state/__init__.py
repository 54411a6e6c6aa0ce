"""The bus as a synchronous state machine: admission, leases, the staleness window, snapshots. It imports no Ray.

Start reading in `bus_state.py`.
"""
