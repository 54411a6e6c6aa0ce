"""Tests `relax explain`."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.cli.explain_key import explain_command
from relax_core.config.help import keys_of_option, keys_of_root
from relax_core.config.options import conf_folder, groups, yaml_options

REPOSITORY = Path(__file__).resolve().parents[2]


def explained(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    assert explain_command(words) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    return {"value": first} | {line[2:10].strip(): line[11:] for line in lines}


def test_a_key_has_value_type_range_place_and_class(capsys: pytest.CaptureFixture[str]) -> None:
    printed = explained(capsys, "optimizer.lr")
    assert printed["value"] == "optimizer.lr=0.0008"
    assert printed["meaning"].startswith("learning rate")
    assert (printed["type"], printed["range"]) == ("a number", "more than 0")
    line = int(printed["set in"].removeprefix("conf/config.yaml, line "))
    assert (REPOSITORY / "conf" / "config.yaml").read_text().splitlines()[line - 1].startswith("  lr: ")
    assert printed["class"] == "OptimizerConfig in relax_core/config/schema.py"
    assert explained(capsys, "algo.clip_high")["class"] == "ClipConfig in algorithms/policy_gradient/config.py"
    assert explained(capsys, "run.epochs")["range"] == "more than 0 (null does not change run.steps)"


@pytest.mark.parametrize(
    ("arguments", "value", "location"),
    [
        (["seed", "seed=3"], "seed=3", "the command line: seed=3"),
        (["algo.epochs", "algo=ppo"], "algo.epochs=2", "conf/algo/ppo.yaml, line "),
        (["data.eval_size", "experiment=math_file"], "data.eval_size=64", "conf/experiment/math_file.yaml, line "),
        (["launcher.memory_gb", "launcher=slurm"], "launcher.memory_gb=null", "conf/launcher/slurm.yaml, line "),
        (["env.name"], "env.name=single_turn", "conf/env/single_turn.yaml, line "),
        (["mode.on_stale"], "mode.on_stale=drop", "conf/mode/async.yaml, line "),
        (["parallel.forward.tp", "parallel.forward.tp=2"], "parallel.forward.tp=2", "the command line: "),
        (["engine.python"], "engine.python=null", "its default in relax_core/config/schema.py"),
    ],
)
def test_where_a_key_is_set(
    capsys: pytest.CaptureFixture[str], arguments: list[str], value: str, location: str
) -> None:
    printed = explained(capsys, *arguments)
    assert printed["value"] == value
    assert printed["set in"].startswith(location)


def test_a_section_lists_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_command(["algo", "algo=ppo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  algo.gae_lambda=0.95") and "GAE" in line for line in lines)
    assert explain_command(["eval"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_what_is_no_key_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        (["optimiser.lr"], "Nearest: optimizer.lr."),
        (["learning_rate"], "Here it is optimizer.lr."),
        (["algo.clip_hihg"], "algo.clip_hihg is not a key."),
        (["seed", "seed=x"], "expected a whole number"),
    ):
        assert explain_command(words) == 2
        assert text in capsys.readouterr().err
    assert explain_command([]) == 2 and explain_command(["--help"]) == 0


def test_every_value_of_conf_is_found_with_its_comment() -> None:
    """The printed file and line contain the key."""
    found = keys_of_root()
    for group in groups():
        for option in yaml_options(group):
            found += keys_of_option(group, conf_folder() / group / f"{option}.yaml")
    for field in found:
        line = field.file.read_text().splitlines()[field.line - 1]
        assert line.strip().startswith(f"{field.key.split('.')[-1]}: ") and field.value in line
    keys = {field.key for field in found}
    assert {"optimizer.lr", "algo.gamma", "launcher.follow", "parallel.forward", "data.eval_path", "seed"} <= keys
    assert not [key for key in keys if key.startswith(("defaults", "hydra"))]


def test_a_number_that_the_model_brings_is_set_in_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    printed = explained(capsys, "optimizer.lr", "model=qwen3")
    assert printed["set in"].startswith("conf/experiment/published_text.yaml, line ")
