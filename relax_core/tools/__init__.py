"""Commands outside a run: `relax check-model`, `compare`, `export`, `lineage`, and the makers of tiny models and data.

Each module is one command with a function `main`. Start reading in `lineage.py`, which needs a ledger file only.
"""
