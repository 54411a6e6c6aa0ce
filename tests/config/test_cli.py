"""The command line as a user meets it: a real process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from relax_core.__main__ import main
from relax_core.config import compose
from relax_core.config.help import help_text
from relax_core.config.options import groups

REPOSITORY = Path(__file__).resolve().parents[2]


def relax(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "relax_core", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )


MISTAKES = [
    (
        ["model=qwen3_omni"],
        "relax: model=qwen3_omni is not built yet. What exists for model: llama, mistral, qwen2, qwen3, qwen3_moe",
    ),
    (["run.stesp=3"], "relax: run.stesp is not a key."),
    (["rollout.temperature=0", "seed=-1"], "relax: 2 problems in the configuration"),
    (["seed=[1"], "relax: 'seed=[1' is not key=value."),
    (["--nonsense"], "relax: --nonsense is not a flag of relax."),
]


@pytest.mark.parametrize(("arguments", "text"), MISTAKES)
def test_a_mistake_is_one_screen_and_exit_code_2(arguments: list[str], text: str) -> None:
    result = relax(*arguments)
    assert result.returncode == 2
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) < 24
    assert result.stdout == ""


def test_a_mistake_is_told_before_anything_heavy_is_imported() -> None:
    code = (
        "import sys; from relax_core.__main__ import main\n"
        f"for arguments in {[arguments for arguments, _ in MISTAKES]!r}:\n"
        "    try:\n"
        "        assert main(arguments) == 2\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 2\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'megatron') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "[]", result.stderr


def test_validation_imports_nothing_heavy() -> None:
    code = (
        "import sys; from relax_core.config.compose import load_config; from relax_core.preflight import CHECKS; "
        "load_config(checks=CHECKS); "
        "print([name for name in ('torch', 'ray', 'transformers', 'megatron') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "[]", result.stderr


def test_cfg_prints_the_configuration() -> None:
    result = relax("--cfg", "job", "seed=7")
    assert result.returncode == 0
    assert yaml.safe_load(result.stdout)["seed"] == 7


def test_help_names_every_group_and_the_usual_keys() -> None:
    result = relax("--help")
    assert result.returncode == 0
    assert result.stdout.strip() == help_text().strip()
    for word in (*groups(), "seed", "run.steps", "optimizer.lr", "mode.max_staleness", "model.path", "resume", "-m"):
        assert f"  {word}" in result.stdout or f" {word}," in result.stdout


def test_the_tab_key_completes_groups_options_and_keys() -> None:
    """What the shell asks `relax` for, by Hydra's own protocol."""
    for line, words in (
        ("relax placement=", ["placement=cpu", "placement=gpu"]),
        ("relax rollout.temp", ["rollout.temperature="]),
    ):
        environment = {**os.environ, "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_CWORD": "1"}
        asked = subprocess.run(
            [sys.executable, "-m", "relax_core", "-sc", "query=bash"],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert asked.stdout.split() == words, asked.stderr


def test_a_single_run_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert compose.run([], lambda config: 0) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_ctrl_c_before_anything_runs_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object, **options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(compose, "run", interrupted)
    assert main([]) == 130
    assert capsys.readouterr().err == "relax: interrupted\n"
