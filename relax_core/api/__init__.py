"""Relax as a library: `relax_core.run` and `relax_core.load_run` (docs/api.md)."""
