"""Tests the derived number of threads."""

from __future__ import annotations

import pytest

from relax_core.config.compose import compose, load_config, typed_config
from relax_core.plan import threads


@pytest.mark.parametrize(
    ("arguments", "large", "expected"),
    [
        (["mode=colocate"], True, 6),
        (["mode=colocate", "engine.count=4"], True, 1),
        (["mode=colocate", "parallel=dp2"], True, 3),
        (["mode=colocate", "engine.threads=5"], True, 5),
        (["mode=colocate"], False, 1),
        (["mode=async"], True, 1),
    ],
)
def test_all_cores_of_a_large_model_in_colocate_and_one_otherwise(
    arguments: list[str], large: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "cores_of_a_node", lambda _: 6)
    if large:
        monkeypatch.setattr(threads, "is_large", lambda _: True)
    assert threads.with_threads(load_config(arguments)).engine.threads == expected


@pytest.mark.parametrize(
    ("arguments", "large"), [(["model=tiny_qwen3"], False), (["model=qwen3", "model.shape=Qwen3-4B"], True)]
)
def test_which_models_are_large(arguments: list[str], large: bool) -> None:
    assert threads.is_large(typed_config(compose(arguments))) is large
