"""Contains commands outside a run, such as `relax check-model` and `export`, and makers of tiny models and data.

Each module is one command with a function `main`. Start reading in `lineage.py`, which needs only a ledger file.
"""
