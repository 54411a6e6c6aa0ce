"""Tests the command line in a real process."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

import relax_core
from relax_core.__main__ import main
from relax_core.config import compose
from relax_core.config.help import help_text
from relax_core.config.options import COMMANDS, groups

REPOSITORY = Path(__file__).resolve().parents[2]


def relax(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "relax_core", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )


MISTAKES = [
    (["modality=omni"], "relax: modality=omni does not exist. Here it is modality=auto"),
    (["run.stesp=3"], "relax: run.stesp is not a key."),
    (["rollout.temperature=0", "seed=-1"], "relax: 2 problems in the configuration"),
    (["seed=[1"], "relax: 'seed=[1' is not key=value."),
    (["--nonsense"], "relax: --nonsense is not a flag of relax."),
]


@pytest.mark.parametrize(("arguments", "text"), MISTAKES)
def test_a_mistake_is_one_screen(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert text in output.err and "Traceback" not in output.err
    assert len(output.err.splitlines()) < 24 and output.out == ""


def test_a_mistake_ends_the_process_with_exit_code_2() -> None:
    result = relax("run.stesp=3", "seed=-1")
    assert (result.returncode, result.stdout) == (2, "") and "run.stesp is not a key." in result.stderr


def test_a_mistake_is_told_before_anything_heavy_is_imported() -> None:
    code = (
        "import sys; from relax_core.__main__ import main\n"
        f"for arguments in {[arguments for arguments, _ in MISTAKES]!r}:\n"
        "    try:\n"
        "        assert main(arguments) == 2\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 2\n"
        "for arguments in (['--help'], ['algo=ppo', '--help'], ['--version'], ['explain', 'seed'], ['plan=true']):\n"
        "    assert main(arguments) == 0\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'megatron') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert result.stdout.splitlines()[-1] == "[]", result.stderr


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


def test_help_of_what_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algo=ppo", "--help"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("algo=ppo: PPO (arXiv 1707.06347) with a critic")
    assert "  algo.gae_lambda=0.95" in output and "  algo.value_clip=0.2" in output
    assert len(output.splitlines()) < 40
    assert main(["launcher=slurm", "reward.name=math", "-h"]) == 0
    output = capsys.readouterr().out
    assert "  launcher.memory_gb=null" in output and "  reward.timeout_s=10.0" in output
    source = Path(__file__).resolve().parents[2] / "examples" / "plugins" / "sqlite_source.py"
    assert main([f"data.name={source}", "--help"]) == 0
    output = capsys.readouterr().out
    assert "rows of an SQLite table" in output and "  data.config.table=rows " in output
    assert main(["algo=ppoo", "--help"]) == 2
    assert "algo=ppoo does not exist. Nearest: ppo." in capsys.readouterr().err


def test_the_version_is_relaxs_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"relax {relax_core.__version__}\n"
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert "version" not in settings["project"]
    assert settings["tool"]["hatch"]["version"]["path"] == "relax_core/__init__.py"


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in ("train", "list")])
def test_every_command_is_reached_and_says_how_it_is_typed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):  # argparse's own message
        main([command, "--help"])
    assert f"relax {command}" in capsys.readouterr().out


def test_commands_are_given_their_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path)]) == 2
    assert f"{tmp_path}: it has neither sweep.json" in capsys.readouterr().err
    assert main(["check-model", str(tmp_path)]) == 2
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert main(["lineage", str(tmp_path)]) == 2
    assert main(["rerun", str(tmp_path)]) == 2
    assert "it has no config.yaml. relax rerun RUN" in capsys.readouterr().err
    assert main(["train", "run.stesp=1"]) == 2
    assert "run.stesp is not a key" in capsys.readouterr().err
    assert main(["train", "plan=true", "seed=-1"]) == main(["demo", "plan=true", "seed=-1"]) == 1


@pytest.mark.parametrize("arguments", [["--help"], ["plan=json"], ["list"]])
def test_output_that_nobody_reads_ends_quietly(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "relax_core", *arguments]
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300, check=False
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_tab_key_completes_groups_options_and_keys() -> None:
    """Imitates the shell's completion request to `relax`, by Hydra's protocol."""
    for line, words in (
        ("relax placement=", ["placement=cpu", "placement=gpu", "placement=one_gpu"]),
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
