"""Tests that only the processes that need them receive environment variables from the configuration."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from launchers.local import save_config
from launchers.ray_job.entrypoint import entrypoint, job_text, launcher_of
from launchers.slurm import sbatch
from launchers.submitted import make_folder, read_submitted
from launchers.sweep import Sweep
from relax_core.__main__ import main
from relax_core.cli.explain_key import explain_command
from relax_core.config.compose import config_from_yaml, load_config, run
from relax_core.config.errors import ConfigError
from relax_core.config.hydra_overrides import CommandLine, quoted, without_secrets
from relax_core.config.redaction import REDACTED, FromVariable, redacted
from relax_core.config.rerun import rerun_line
from relax_core.config.rollout_checks import agent_environment
from relax_core.config.saved_config import plain, to_yaml, to_yaml_with_secrets
from relax_core.config.schema import RelaxConfig
from relax_core.rollout.agent_processes.agent_process import AgentProcess

ROOT = Path(__file__).resolve().parents[2]
END_S = 200.0
# Each value contains a mark that can be found in a file despite quotes or escapes.
MARKS = {
    "TOKEN": "1f93ab77c2",
    "harmless": "words-5521-here",
    "QUOTED": "quote-8812-x",
    "UNICODE": "size-7741-y",
    "LINES": "second-3392-z",
    "SHORT": "q~7Zx",
    "NUMBER": "40718825519",
    "BRACES": "brace-6617-w",
    "EQUALS": "YWJjZDEyMzQ1",
}
VALUES = {
    "TOKEN": "tok-1f93ab77c2",
    "harmless": "plain words-5521-here",
    "QUOTED": 'it\'s "a" quote-8812-x',
    "UNICODE": "größe-秘密-size-7741-y",
    "LINES": "first\nsecond-3392-z",
    "SHORT": "q~7Zx",
    "NUMBER": "40718825519",
    "BRACES": "{a: [b, ${c}]}-brace-6617-w",
    "EQUALS": "YWJjZDEyMzQ1==",
}
BY_VARIABLE, OF_A_FILE = "TOKEN", "LINES"


def typed_words(folder: Path) -> list[str]:
    """Returns overrides that set all values: one by one, as a mapping, by a variable, and in the user's own YAML."""
    own = folder / "own" / "experiment"
    own.mkdir(parents=True)
    text = yaml.safe_dump({"agent": {"env": {OF_A_FILE: VALUES[OF_A_FILE]}}})
    (own / "mine.yaml").write_text(f"# @package _global_\n{text}", encoding="utf-8")
    mapped = ("QUOTED", "UNICODE")
    single = [name for name in VALUES if name not in (*mapped, BY_VARIABLE, OF_A_FILE)]
    return [
        f"--config-dir={own.parent}",
        "experiment=mine",
        f"agent.env={{{', '.join(f'{name}: {quoted(VALUES[name])}' for name in mapped)}}}",
        f"agent.env.{BY_VARIABLE}=${{oc.env:RELAX_TEST_TOKEN}}",
        *(f"{'+' if name == 'SHORT' else ''}agent.env.{name}={quoted(VALUES[name])}" for name in single),
    ]


def found_in(data: bytes) -> list[str]:
    return [name for name, mark in MARKS.items() if mark.encode() in data]


def assert_no_value(text: str) -> None:
    assert found_in(text.encode()) == []


@pytest.fixture
def variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_TEST_TOKEN", VALUES[BY_VARIABLE])


@pytest.fixture
def words(tmp_path: Path, variable: None) -> list[str]:
    return typed_words(tmp_path)


@pytest.fixture
def config(words: list[str]) -> RelaxConfig:
    found: list[RelaxConfig] = []

    def job(config: RelaxConfig) -> int:
        found.append(config)
        return 0

    assert run(CommandLine.of(without_secrets(words)), job) == 0
    return found[0]


def commands() -> dict[int, bytes]:
    """Returns the command line of each process of this machine. Every user can see these command lines."""
    shown = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            shown[int(folder.name)] = (folder / "cmdline").read_bytes()
        except OSError:
            continue
    return shown


def test_a_run_keeps_and_shows_no_value(tmp_path: Path, variable: None) -> None:
    folder, output = tmp_path / "run", tmp_path / "output"
    options = ("run.steps=1", "eval.every=1", "eval.rows=4", "rollout.prompts_per_step=2", "algo.group_size=4")
    command = [sys.executable, "-m", "relax_core", *typed_words(tmp_path), f"run.dir={folder}", *options]
    environment = os.environ | {"RELAX_TEST_TOKEN": VALUES[BY_VARIABLE]}
    own, hidden, seen = os.getpid(), False, set()
    with output.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + END_S
        try:
            while process.poll() is None and time.monotonic() < deadline:
                shown = {pid: found_in(line) for pid, line in commands().items() if pid != own}
                # An interpreter must start before it can remove the arguments from its own command line.
                hidden = hidden or (process.pid in shown and not shown[process.pid] and folder.exists())
                seen |= {pid for pid, names in shown.items() if names and (hidden or pid != process.pid)}
                time.sleep(0.2)
            assert process.poll() == 0, output.read_text(errors="replace")
        finally:
            process.kill()
            process.wait()
    assert hidden and not seen, "ps shows a value"
    assert found_in(output.read_bytes()) == [], "the terminal shows a value"
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert {"config.yaml", "summary.json"} <= {file.name for file in files} and len(files) > 10
    assert any("tfevents" in file.name for file in files) and (folder / "checkpoints").is_dir()
    leaks = {str(file.relative_to(folder)): names for file in files if (names := found_in(file.read_bytes()))}
    assert leaks == {}
    summary = json.loads((folder / "summary.json").read_text())
    assert f"agent.env.NUMBER={REDACTED}" in summary["run"]["overrides"], "the names of variables are kept"
    with pytest.raises(ConfigError) as caught:
        rerun_line([str(folder)])
    asked = {problem.split(" ")[0] for problem in caught.value.problems}
    assert asked == {f"agent.env.{name}" for name in VALUES if name != BY_VARIABLE}


def test_the_agent_gets_every_value_as_it_was_typed(config: RelaxConfig) -> None:
    assert dict(config.agent.env) == VALUES
    got = {name: value for name, value in agent_environment(config.agent, {}).items() if name in VALUES}
    program = "import json, os, sys; json.dump(dict(os.environ), sys.stdout)"
    done = subprocess.run([sys.executable, "-c", program], env=got, capture_output=True, check=True)
    assert {name: json.loads(done.stdout)[name] for name in VALUES} == VALUES


def test_no_form_of_the_configuration_shows_a_value(config: RelaxConfig, words: list[str]) -> None:
    for text in (to_yaml(config), repr(config), str(config), json.dumps(plain(config))):
        assert_no_value(text)
    for name, shown in plain(config)["agent"]["env"].items():
        assert shown == ("${oc.env:RELAX_TEST_TOKEN}" if name == BY_VARIABLE else REDACTED)
    again = pickle.loads(pickle.dumps(config))  # the form that Ray sends to a role's process
    assert to_yaml(again) == to_yaml(config) and isinstance(again.agent.env[BY_VARIABLE], FromVariable)


@pytest.mark.parametrize("key", ["agent", "agent.env", "agent.env.harmless"])
def test_explain_shows_no_value(key: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    own = without_secrets([word for word in words if "config-dir" not in word and word != "experiment=mine"])
    assert explain_command([key, *own]) == 0
    shown = capsys.readouterr().out
    assert_no_value(shown)
    assert REDACTED in shown


def test_messages_show_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    mark, wrong = MARKS["harmless"], "rollout.workers=0"
    lines = [
        [f"agent.env.A={mark}", wrong],
        [f"agent.env.A={mark},x"],
        [f"agent.env.A={mark}=b", wrong],
        [f"agent.env.A=[{mark}=b"],  # Hydra cannot parse it
        [f"agent.env.A='{mark}"],
        [f"agent.env={{A: '{mark}'"],
        [f"agent={{env: {{A: {mark}"],
        [f"agent.env={{A: {{B: {mark}}}}}"],
        [f"+agnt.env.A={mark}"],
        [f"seed=http://user:{mark}@host"],
        ["launcher=ray_job", f"launcher.env=[{mark}]"],
        [f"hydra.job.env_set.A={mark}", wrong],
    ]
    for words in lines:
        try:
            code = main(words)
        except SystemExit as error:
            code = int(str(error.code))
        output = capsys.readouterr()
        assert code == 2, words
        assert mark not in output.out + output.err, words
        assert output.err.startswith("relax: "), words


async def _output_of(program: str, value: str) -> str:
    command = [sys.executable, "-c", program]
    process = await AgentProcess.start(command, cwd="/", env={"A": value}, secrets=[value])
    return (await process.wait()).describe()


def test_what_an_agent_writes_is_shown_without_its_values() -> None:
    program = "import os, sys; print('I have', os.environ['A']); sys.exit(3)"
    shown = asyncio.run(_output_of(program, VALUES["harmless"]))
    assert f"I have {REDACTED}" in shown and "exit code 3" in shown
    assert_no_value(shown)


def test_no_engine_gets_a_key_on_its_command_line() -> None:
    with pytest.raises(ConfigError, match=r"engine\.flags\.api-key") as caught:
        load_config(["engine=sglang", f"+engine.flags.api-key={MARKS['TOKEN']}"])
    assert_no_value(str(caught.value))


def test_a_plan_shows_no_value(tmp_path: Path, capfd: pytest.CaptureFixture[str], variable: None) -> None:
    for plan in ("true", "json"):
        assert main([*typed_words(tmp_path / plan), f"plan={plan}"]) == 0
        output = capfd.readouterr()
        assert_no_value(output.out + output.err)


def test_a_sweep_keeps_no_value(tmp_path: Path, variable: None, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def job(config: RelaxConfig) -> int:
        save_config(config, Path(config.run.dir))
        seen.append(config.agent.env["harmless"])
        assert_no_value(" ".join(sys.argv))
        return 0

    values = f"{MARKS['harmless']},{MARKS['TOKEN']}"
    line = CommandLine.of(
        without_secrets(
            ["-m", f"agent.env.harmless={values}", f"run.dir={tmp_path}/runs/x", f"hydra.sweep.dir={tmp_path}/sweep"]
        )
    )
    assert run(line, job, sweep=Sweep(job)) == 0
    assert seen == [MARKS["harmless"], MARKS["TOKEN"]]
    output = capsys.readouterr()
    assert_no_value(output.out + output.err)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"multirun.yaml", "sweep.json", "config.yaml"} <= {file.name for file in files}
    for file in tmp_path.rglob("*"):
        assert_no_value(file.name)
        assert not file.is_file() or found_in(file.read_bytes()) == [], file


def test_a_slurm_job_keeps_values_in_one_private_file(tmp_path: Path, words: list[str]) -> None:
    configs: list[RelaxConfig] = []

    def job(config: RelaxConfig) -> int:
        configs.append(config)
        return 0

    line = CommandLine.of(without_secrets([*words, "launcher=slurm", f"run.dir={tmp_path}/run"]))
    assert run(line, job) == 0
    made = make_folder(configs[0], [])
    assert_no_value(sbatch.script(made, tmp_path / "run" / "slurm", jobs=1))
    holders = [file for file in (tmp_path / "run").rglob("*") if file.is_file() and found_in(file.read_bytes())]
    assert [file.name for file in holders] == ["submitted.yaml"] and holders[0].stat().st_mode & 0o777 == 0o600
    again, _ = read_submitted(holders[0].read_text(encoding="utf-8"))
    assert dict(again.agent.env) == VALUES


def test_a_ray_job_takes_references_and_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_TEST_TOKEN", VALUES["TOKEN"])
    job = ["launcher=ray_job", 'launcher.env=["PLACE=words-5521-here"]']
    config = load_config(without_secrets([*job, "agent.env.A=${oc.env:RELAX_TEST_TOKEN}"]))
    text = job_text(config, [])
    assert_no_value(text + entrypoint(launcher_of(config)))
    assert read_submitted(text)[0].agent.env == {"A": VALUES["TOKEN"]}
    monkeypatch.delenv("RELAX_TEST_TOKEN")
    with pytest.raises(ConfigError, match="RELAX_TEST_TOKEN"):
        read_submitted(text)
    with pytest.raises(ValueError, match=r"agent\.env\.A=<redacted>.*oc\.env") as caught:
        job_text(load_config([*job, f"agent.env.A={quoted(VALUES['SHORT'])}"]), [])
    assert_no_value(str(caught.value))


def test_a_repeated_run_asks_for_values_and_takes_references(tmp_path: Path, variable: None) -> None:
    config = load_config([f"agent.env.{BY_VARIABLE}=${{oc.env:RELAX_TEST_TOKEN}}", "agent.env.B=b", "agent.env.C=c"])
    save_config(config, tmp_path)
    assert f"{BY_VARIABLE}: ${{oc.env:RELAX_TEST_TOKEN}}" in (tmp_path / "config.yaml").read_text()

    def repeated(*words: str) -> Mapping[str, str]:
        found: list[RelaxConfig] = []

        def job(config: RelaxConfig) -> int:
            found.append(config)
            return 0

        assert run(rerun_line([str(tmp_path), *words]), job) == 0
        return dict(found[0].agent.env)

    with pytest.raises(ConfigError) as caught:
        rerun_line([str(tmp_path), "agent.env.C=new"])
    assert [problem.split(" ")[0] for problem in caught.value.problems] == ["agent.env.B"]
    token = {BY_VARIABLE: VALUES[BY_VARIABLE]}
    assert repeated("agent.env.B=x", "agent.env.C=y") == token | {"B": "x", "C": "y"}
    assert repeated("agent.env={C: z}") == token | {"C": "z"}, "no placeholder remains"
    assert repeated("~agent.env.B", "agent.env.C=y") == token | {"C": "y"}


def test_no_run_starts_with_a_placeholder(tmp_path: Path) -> None:
    for key in ("agent.env.A", "name", "reward.name"):
        with pytest.raises(ConfigError) as caught:
            load_config([f"{key}='{REDACTED}'"])
        assert key in str(caught.value)


def test_values_are_found_by_their_place() -> None:
    values = {
        "env": {"name": "mcp", "servers": {"a": {"command": "x", "env": {"K": "s1", "N": 7}, "headers": ["X: s2"]}}},
        "launcher": {"env": ["NAME=s3", "s4"]},
        "reward": {"token_env": "NAME", "extra_headers": {"a": "s5"}, "url": "https://me:s6@h/p?a=1&api_key=s7#x"},
        "engine": {"flags": {"api-key": "s8", "max_token": 5}, "urls": ["http://u:s9@h"], "token_file": "/t"},
        "tracker": {"sinks": {"/x.py": {"environment": {"deep": [{"more": "s10"}]}, "password": "s11"}}},
    }
    shown = json.dumps(redacted(values))
    assert not [number for number in range(1, 12) if f's{number}"' in shown or f"s{number}@" in shown], shown
    for kept in ("mcp", "NAME=", "/t", '"token_env": "NAME"', '"max_token": 5', "a=1", '"K"'):
        assert kept in shown


def test_a_resolved_variable_is_not_resolved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_TEST_OUTER", "${oc.env:RELAX_TEST_TOKEN}")
    monkeypatch.setenv("RELAX_TEST_TOKEN", VALUES["TOKEN"])
    config = load_config(["name=x-${oc.env:RELAX_TEST_OUTER}", "agent.env.A=${oc.env:RELAX_TEST_OUTER}"])
    assert config.name == "x-${oc.env:RELAX_TEST_TOKEN}" and VALUES["TOKEN"] not in config.run.dir
    assert config.agent.env["A"] == "${oc.env:RELAX_TEST_TOKEN}"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("${oc.env:RELAX_TEST_TOKEN,none}", VALUES["TOKEN"]),
        ("${oc.env:RELAX_TEST_UNSET,none}", "none"),
        ("'Bearer ${oc.env:RELAX_TEST_TOKEN}'", f"Bearer {VALUES['TOKEN']}"),
        ("'step ${run.steps}'", "step 7"),
    ],
)
def test_a_variable_inside_a_value_is_resolved(monkeypatch: pytest.MonkeyPatch, value: str, expected: str) -> None:
    monkeypatch.setenv("RELAX_TEST_TOKEN", VALUES["TOKEN"])
    config = load_config(["run.steps=7", *without_secrets([f"agent.env.A={value}"])])
    assert config.agent.env["A"] == expected and VALUES["TOKEN"] not in to_yaml(config)


def test_a_saved_text_stays_a_text() -> None:
    texts = ["${seed}", r"\${seed}", "\\\\${oc.env:HOME}", "a ${b} ${c:d} \\", "$${y}", "${${x}}", "\n${x}\\"]
    config = load_config([])
    config.rollout.stop = texts

    assert config_from_yaml(to_yaml_with_secrets(config)).rollout.stop == texts
