"""A server that cannot do what the run asks of its engines is refused in words, by what it says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.compose import load_config
from relax_core.preflight import settle
from relax_core.roles.attached_engine import EngineNeeds, engine_needs, fit_problem
from relax_core.tools.make_tiny import tiny_model_folder
from tests.roles.test_engine_owner import context_of

NEEDS = EngineNeeds(vocabulary=64, sample_tokens=96, slots=8)
FITS: dict[str, Any] = {"max_running_requests": 8, "context_length": 96, "max_total_num_tokens": 96, "model_path": "x"}


def test_what_fits_and_what_is_not_told_is_taken() -> None:
    assert fit_problem(FITS, NEEDS) is None
    assert fit_problem({}, NEEDS) is None
    assert fit_problem({"context_length": None, "max_running_requests": None}, NEEDS) is None


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("max_running_requests", 7, "7 samples of one group at once, and the run needs 8"),
        ("max_running_samples", 1, "1 samples of one group at once"),
        ("context_length", 95, "95 tokens of one sample in its context, and the run needs 96"),
        ("max_total_num_tokens", 10, "10 tokens of one sample in its cache"),
        ("max_total_tokens", 10, "10 tokens of one sample in its cache"),
    ],
)
def test_what_is_too_small_is_named_with_what_is_needed(setting: str, value: int, words: str) -> None:
    assert words in str(fit_problem({**FITS, setting: value}, NEEDS))


def test_another_vocabulary_is_named_where_the_model_can_be_seen(tmp_path: Path) -> None:
    needs = engine_needs(context_of(load_config(settle=settle), tmp_path))
    own = tiny_model_folder("tiny_qwen3", task="reverse_digits")
    assert fit_problem({"model_path": str(own)}, needs) is None
    values = json.loads((own / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"vocab_size": needs.vocabulary + 16}))
    found = fit_problem({"model_path": str(tmp_path)}, needs)
    assert f"has {needs.vocabulary + 16} tokens in its vocabulary, and the run's has {needs.vocabulary}" in str(found)
