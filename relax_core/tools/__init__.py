"""Commands beside a run: `relax check-model`, `compare`, `export`, `lineage`, and the makers of tiny models and data.

Each module is a command with a function `main`; start reading in the one that you need.
"""
