from __future__ import annotations

import yaml

from relax_core.config.compose import compose, load_config
from relax_core.config.redaction import REDACTED
from relax_core.config.saved_config import plain, to_yaml


def test_saved_values_are_those_that_ran() -> None:
    saved = yaml.safe_load(to_yaml(load_config(["mode=colocate", "algo.clip_high=0.28"])))
    assert saved["mode"] == {"name": "colocate", "max_staleness": 0, "on_stale": "drop"}
    assert saved["algo"]["clip_high"] == 0.28
    assert list(saved) == list(compose([]))


def test_a_saved_file_can_be_composed_again() -> None:
    config = load_config(["seed=5"])
    saved = yaml.safe_load(to_yaml(config))
    overrides = [
        f"{section}.{key}={'null' if value is None else value}"
        for section in ("optimizer", "rollout")
        for key, value in saved[section].items()
    ]
    assert load_config(overrides).optimizer == config.optimizer


def test_secrets_are_redacted() -> None:
    values = {"api_key": "s3cret", "hub_token": "s3cret", "address": "http://me:s3cret@host/x", "eos_tokens": "kept"}
    shown = plain(values)
    assert "s3cret" not in str(shown)
    assert shown == {
        "api_key": REDACTED,
        "hub_token": REDACTED,
        "address": f"http://{REDACTED}@host/x",
        "eos_tokens": "kept",
    }
