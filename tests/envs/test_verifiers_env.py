"""Tests the command line of env=verifiers, and its refusals. `tests/agents_env/test_verifiers.py` plays a taskset."""

from __future__ import annotations

from pathlib import Path

import pytest

from envs.verifiers import PROGRAM, VerifiersConfig, check, command


def test_the_program_gets_names_or_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sums.py").touch()
    config = VerifiersConfig(taskset="sums.py", harness="bash")
    check(config)
    assert command(config) == ["python", str(PROGRAM), str(tmp_path / "sums.py"), "bash"] and PROGRAM.is_file()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (VerifiersConfig(), r"env\.taskset is empty"),
        (VerifiersConfig(taskset="gone.py"), r"env\.taskset=gone\.py: there is no such file"),
        (VerifiersConfig(taskset="a", harness="gone.py"), r"env\.harness=gone\.py: there is no such file"),
    ],
)
def test_settings_without_sense_are_refused(config: VerifiersConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(config)
