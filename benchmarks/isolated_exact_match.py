"""Runs the reward exact_match in reward workers, for `benchmarks.chaos`."""

from __future__ import annotations

import dataclasses

from rewards.exact_match import SPEC as EXACT_MATCH

SPEC = dataclasses.replace(EXACT_MATCH, name="isolated_exact_match", isolated=True)
