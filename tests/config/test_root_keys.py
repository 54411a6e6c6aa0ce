"""Fixes the root keys, because every saved config.yaml and script depends on them: a change must be deliberate."""

from __future__ import annotations

import dataclasses
from dataclasses import fields

import pytest

from relax_core.config.compose import compose
from relax_core.config.options import groups
from relax_core.config.schema import RelaxConfig
from relax_core.config.schema_keys import REMOVED, known_keys, launcher_keys, unknown_key
from relax_core.registry import KINDS, find, names

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


def test_the_number_of_keys_only_falls() -> None:
    """Each plug-in has its own settings. They are counted once per kind of plug-in."""
    core = {*known_keys(), *launcher_keys()} - set(KINDS)
    own = {
        f"{kind}.{field.name}" for kind in KINDS for name in names(kind) for field in fields(find(kind, name).config)
    }
    # the last two: placement.forward (which GPUs the reference uses), optimizer.states (larger models on a GPU)
    # four keys of model.lora: rank, alpha and targets differ between papers, and rsLoRA is another scale
    # eight settings of sft, dpo and kto: the losses of the literature differ in them
    assert len(core) <= 186 and len(own) <= 111


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_is_refused_with_its_replacement(key: str) -> None:
    assert key not in (*known_keys(), *launcher_keys())
    assert unknown_key(key) == f"{key} is not a key any more. {REMOVED[key]}."
