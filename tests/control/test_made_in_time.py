"""A start waits for the builtin model as long as it waits for its services, and then says what it waited for."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.control.model_folders import made_in_time

CONFIG = load_config(["run.start_timeout_s=0.05"])


def test_what_is_made_is_returned(tmp_path: Path) -> None:
    made: Future[Path] = Future()
    made.set_result(tmp_path)
    assert made_in_time(made, CONFIG, what="the model") == tmp_path


def test_a_model_that_is_still_being_made_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"run.start_timeout_s=0.05: the model tiny is still being made"):
        made_in_time(Future(), CONFIG, what="the model tiny")


def test_a_deadline_within_the_making_keeps_its_words() -> None:
    made: Future[Path] = Future()
    made.set_exception(TimeoutError("the lock of the tiny model"))
    with pytest.raises(TimeoutError, match="the lock of the tiny model"):
        made_in_time(made, CONFIG, what="the model")
