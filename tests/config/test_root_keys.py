"""The root keys are a promise to every saved config.yaml and every script: changing them is a decision, not a slip."""

from __future__ import annotations

import dataclasses

from relax_core.config.compose import compose
from relax_core.config.options import groups
from relax_core.config.schema import RelaxConfig

ROOT_KEYS = (
    "name",
    "seed",
    "resume",
    "plan",
    "algo",
    "model",
    "modality",
    "parallel",
    "placement",
    "mode",
    "engine",
    "bus",
    "data",
    "reward",
    "env",
    "agent",
    "endpoint",
    "tracker",
    "launcher",
    "optimizer",
    "rollout",
    "run",
    "eval",
    "gateway",
    "notify",
)
GROUPS = {
    *("algo", "model", "modality", "parallel", "placement", "mode", "engine", "bus", "data"),
    *("reward", "env", "tracker", "launcher", "experiment", "gateway"),
}


def test_root_keys_are_frozen() -> None:
    assert tuple(field.name for field in dataclasses.fields(RelaxConfig)) == ROOT_KEYS
    assert set(compose([])) == set(ROOT_KEYS)


def test_groups_are_frozen() -> None:
    assert set(groups()) == GROUPS
