"""Tests typed overrides: paths, common traps, names from other trainers, and the user's own files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from relax_core.config.compose import compose, config_from_yaml, load_config, run, typed_config
from relax_core.config.errors import ConfigError
from relax_core.config.hydra_overrides import DOUBLE, SINGLE, CommandLine, hydra_arguments, quoted
from relax_core.config.options import group_options, groups
from relax_core.config.other_frameworks import MEANINGS
from relax_core.config.rerun import marked, rerun_line
from relax_core.config.saved_config import to_yaml, to_yaml_with_secrets
from relax_core.config.schema import RelaxConfig
from relax_core.config.schema_keys import known_keys, launcher_keys
from relax_core.registry import find_algorithm, names


def told(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(words)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    "name", ["a=b.jsonl", "a b.jsonl", "a,b.jsonl", "a(b).jsonl", "it's.jsonl", 'a"b.jsonl', "[a].jsonl", "a\\b", "a:b"]
)
def test_a_path_is_what_was_typed(tmp_path: Path, name: str) -> None:
    own = ("data=file", "reward=math", "model.task=arithmetic")
    assert load_config([*own, f"data.path={tmp_path}/{name}"]).data.path == f"{tmp_path}/{name}"


def test_the_home_folder_and_null_are_not_quoted_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config(["data=file", "reward=math", "model.task=arithmetic", "data.path=~/rows.jsonl"])
    assert config.data.path == f"{tmp_path}/rows.jsonl"
    assert load_config(["resume=null", "data.eval_path=null"]).data.eval_path is None
    assert load_config(["run.dir=runs/${name}/x", "name=one"]).run.dir == str(Path.cwd() / "runs/one/x")
    assert load_config(["run.dir='runs/a=b'"]).run.dir == str(Path.cwd() / "runs/a=b")


def test_a_plugin_file_is_found_from_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copy(Path(__file__).parents[2] / "rewards" / "math.py", tmp_path / "my reward.py")
    assert load_config(["reward.name=~/my reward.py"]).reward.name == f"{tmp_path}/my reward.py"


@given(text=st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1), mark=st.sampled_from([SINGLE, DOUBLE]))
def test_hydra_reads_quoted_text_as_it_was(text: str, mark: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"key={quoted(text, mark=mark)}"])
    assert str(override.value()) == text


def test_commas_separate_the_paths_of_a_sweep() -> None:
    assert hydra_arguments(["-m", "model.path=~/a,/b=c"]) == ["model.path='~/a','/b=c'", "-m"]
    assert hydra_arguments(["-m", "data=file", "data.path=choice(/a,/b)"]) == [
        "data=file",
        "data.path=choice(/a,/b)",
        "-m",
    ]


def test_flags_may_stand_anywhere(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    overrides = ["seed=1", "-m", "experiment=a", "--config-dir", str(tmp_path), "run.steps=2"]
    assert hydra_arguments(overrides) == ["seed=1", "experiment=a", "run.steps=2", "-m", "--config-dir", str(tmp_path)]


def test_a_run_is_described_by_the_typed_overrides(tmp_path: Path) -> None:
    line = CommandLine.of([f"data.path={tmp_path}/a=b", "algo.name=grpo", "seed=3"])
    assert line.as_typed(line.hydra) == [f"data.path={tmp_path}/a=b", "algo.name=grpo", "seed=3"]
    sweep = CommandLine.of(["-m", "optimizer.lr=1e-3", "seed=1,2"])
    assert sweep.swept(["optimizer.lr=0.001", "seed=2"]) == ["seed=2"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["reward=[math,reverse_digits]"], "reward takes one option. Choose one of math, reverse_digits."),
        (["hydra.run.dir=X"], "hydra.run.dir is not used: a run's folder is run.dir."),
        (["hydra.job.chdir=true"], "hydra.job.chdir is not used"),
        (["+experiment=math_file"], "it takes no plus: experiment=math_file."),
        (["+algo=ppo"], "it takes no plus: algo=ppo."),
        (["experiment=/mine/experiment/x.yaml"], "by its name, not by its path: --config-dir /mine experiment=x,"),
        (["experiment=~/x.yaml"], "--config-dir FOLDER experiment=x, where the file is FOLDER/experiment/x.yaml."),
        (["experiment=math_file.yaml"], "an option is named without its suffix: experiment=math_file."),
        (["algo=/mine/algo.py"], "a file of your own is algo.name=/mine/algo.py."),
        (["--config-path", "/mine"], "--config-path would replace Relax's configuration."),
        (["--config-name=config"], "To repeat a run: relax rerun RUN."),
        (["-cn", "config"], "To repeat a run: relax rerun RUN."),
        (["--config-dir", "/nowhere"], "--config-dir /nowhere: no such folder."),
        (["--config-dir=/usr"], "--config-dir /usr: it has no folder of a group, such as experiment/."),
        (["--learning_rate=1e-4"], "Settings are written as key=value: optimizer.lr=1e-4"),
        (["--run.steps", "3"], "Settings are written as key=value: run.steps=3"),
        (["--optimizer.lr=1e-4"], "Settings are written as key=value: optimizer.lr=1e-4"),
        (["--multi-run"], "--multi-run is not a flag of relax. Nearest: --multirun."),
        (["data.config.x=a=b"], "takes quotes: 'data.config.x=\"a=b\"'"),
        (["name=a,b"], "A text with a comma takes quotes: 'name=\"a,b\"'."),
        (["comapre"], "Nearest: relax compare."),
        (["algo=gropo"], "algo=gropo does not exist. Nearest: grpo."),
        (["algo=GRPO"], "algo=GRPO does not exist. Nearest: grpo."),
        (["algo.name=GRPO"], "algo.name=GRPO is not known. What exists: "),
        (["model=Tiny_Qwen3"], "Nearest: tiny_qwen3."),
    ],
)
def test_the_way_that_works_is_named(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments, lambda config: pytest.fail("it started")) == 2
    assert text in capsys.readouterr().err


def test_a_runs_folder_as_config_dir_is_repeated_in_another_way(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {}\n")
    assert told("--config-dir", str(tmp_path)).endswith(f"It is a run's folder: relax rerun {tmp_path}.")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("learning_rate", "optimizer.lr"),
        ("batch_size", "rollout.prompts_per_step"),
        ("max_steps", "run.steps"),
        ("n_gpus", "placement.gpus_per_node"),
        ("clip_ratio", "algo.clip_low and algo.clip_high"),
        ("actor_rollout_ref.actor.optim.lr", "optimizer.lr"),
        ("actor_rollout_ref.actor.ppo_epochs", "algo.epochs"),
        ("actor_rollout_ref.rollout.something_new", "model and optimizer and algo"),
        ("data.train_batch_size", "rollout.prompts_per_step"),
        ("trainer.total_epochs", "run.epochs"),
        ("+trainer.n_gpus_per_node", "placement.gpus_per_node"),
    ],
)
def test_other_trainers_names_get_the_key_that_means_the_same(name: str, key: str) -> None:
    assert told(f"{name}=1").startswith(f"{name.lstrip('+')} is not a key. Here it is {key}")


def test_every_synonym_leads_to_a_key_that_exists() -> None:
    config = {f"algo.{setting}" for name in names("algo") for setting in vars(find_algorithm(name).config())}
    keys = {*known_keys(), *config, *launcher_keys(), "name", "seed", "resume", "reward.name", "plan=true"}
    options = {f"{group}={option}" for group in groups() for option in group_options(group)}
    sections = {key.split(".")[0] for key in keys}
    wrong = [key for meaning in MEANINGS for key in meaning.keys if key not in keys | options | sections]
    assert wrong == []
    given_twice = [name for meaning in MEANINGS for name in meaning.names]
    assert len(given_twice) == len(set(given_twice))
    assert not [name for name in given_twice if name in keys]


def test_files_of_the_users_own_lie_in_a_folder_of_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "algo").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /algo: my_grpo\noptimizer: {lr: 2e-4}\n"
    )
    (tmp_path / "algo" / "my_grpo.yaml").write_text("defaults: [grpo]\nclip_high: 0.3\n")
    (tmp_path / "experiment" / "bare.yaml").write_text("optimizer: {lr: 2e-4}\n")
    seen: list[RelaxConfig] = []

    def job(config: RelaxConfig) -> int:
        seen.append(config)
        return 0

    assert run(["--config-dir", str(tmp_path), "experiment=mine", "seed=4"], job) == 0
    assert (seen[0].optimizer.lr, seen[0].algo.clip_high, seen[0].seed) == (2e-4, 0.3, 4)
    assert run(["--config-dir", str(tmp_path), "experiment=mime"], job) == 2
    assert "experiment=mime does not exist. Nearest: mine. What exists for experiment: bare," in capsys.readouterr().err
    assert run(["--config-dir", str(tmp_path), "experiment=bare"], job) == 2
    assert "in experiment/bare.yaml: its first line must be '# @package _global_'" in capsys.readouterr().err


def value(key: str, *words: str) -> object:
    return value_in(typed_config(compose(words)), key)


def value_in(config: object, key: str) -> object:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


@pytest.mark.parametrize("text", ["83e1234", "1e5", "1_0", "007", "true", "Null", "inf", "über", "a=b", "(x)", "it's"])
def test_a_text_keeps_its_characters(text: str) -> None:
    expected = {
        "name": (f"name={text}", text),
        "rollout.stop": (f"rollout.stop=[{text},x]", [text, "x"]),
        "agent.env": (f"agent.env={{K: {text}, L: y}}", {"K": text, "L": "y"}),
        "launcher.python": (f"launcher.python={text}", text),
        "reward.by": (f"reward.by={text}", text),  # a setting of a plug-in
    }
    config = typed_config(compose(["launcher=slurm", *(word for word, _ in expected.values())]))
    assert {key: value_in(config, key) for key in expected} == {key: wanted for key, (_, wanted) in expected.items()}
    assert value("agent.env.K", f"agent.env.K={text}") == text


@pytest.mark.parametrize(
    ("word", "key", "expected"),
    [
        ("rollout.stop=[</answer>]", "rollout.stop", ["</answer>"]),
        ('rollout.stop=["</answer>"]', "rollout.stop", ["</answer>"]),
        ("rollout.stop=[[/INST],null]", "rollout.stop", ["[/INST]", "null"]),
        ('rollout.stop=[。,"a,b"]', "rollout.stop", ["。", "a,b"]),
        ("eval.sets={'a/b': /f, c: null}", "eval.sets", {"a/b": "/f", "c": None}),
        ("data.paths=[/ü.jsonl,/b.jsonl]", "data.paths", ["/ü.jsonl", "/b.jsonl"]),
        ("data.path=/d/ü/数据.jsonl", "data.path", "/d/ü/数据.jsonl"),
        ("data.prompt_key=问题", "data.prompt_key", "问题"),
        ("data.chat_template_kwargs={x: 1e5, y: 数据}", "data.chat_template_kwargs", {"x": 1e5, "y": "数据"}),
        ("algo.rejection={token_ratio: [0.5,5e0]}", "algo.rejection", {"token_ratio": [0.5, 5.0]}),
        ("name=${seed}x", "name", "0x"),
        ("optimizer.lr=1e-3", "optimizer.lr", 1e-3),
    ],
)
def test_lists_mappings_and_texts_beyond_ascii(word: str, key: str, expected: object) -> None:
    assert value(key, word) == expected


def test_a_sweep_keeps_the_characters_of_each_text() -> None:
    assert hydra_arguments(["-m", "name=1e5,007,a"]) == ["name='1e5','007',a", "-m"]
    line = CommandLine.of(["-m", "name=ü,1e5", "seed=1,2"])
    assert line.swept(["name='1e5'", "seed=2"]) == ["name='1e5'", "seed=2"]


def test_the_characters_survive_the_saved_configuration(tmp_path: Path) -> None:
    config = load_config(["name=83e1234", "rollout.stop=[1e5,007,true]", f"run.dir={tmp_path}"])
    (tmp_path / "config.yaml").write_text(marked(to_yaml(config)))
    again: list[RelaxConfig] = []
    assert run(rerun_line([str(tmp_path)]), lambda config: again.append(config) or 0) == 0
    assert [(rerun_config.name, rerun_config.rollout.stop) for rerun_config in again] == [
        ("83e1234", ["1e5", "007", "true"])
    ]
    assert config_from_yaml(to_yaml_with_secrets(config)).name == "83e1234"


def test_a_file_without_its_first_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bad.yaml").write_text("defaults:\n  - override /algo: dr_grpo\nseed: 1\n")
    line = ["--config-dir", str(tmp_path), "experiment=bad"]
    assert run(line, lambda config: pytest.fail("it started")) == 2
    assert "experiment/bad.yaml: its first line must be '# @package _global_'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("name: 4e123", ("experiment/own.yaml, line 2", "name: 4e123", '"4e123"')),
        ("rollout:\n  stop: [a, 1e5]", ("line 3", "rollout.stop", '"1e5"')),
        ("agent:\n  env: {K: 007}", ("agent.env.K", '"007"')),
        ("reward: {by: 1_0}", ("reward.by", '"1_0"')),
        ("run: {steps: 10, epochs: 2}", ("run.steps=10", "run.epochs=2")),
    ],
)
def test_a_user_file_with_misread_values_is_refused(tmp_path: Path, text: str, arguments: tuple[str, ...]) -> None:
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "own.yaml"
    file.write_text(f"# @package _global_\n{text}\n")
    line = ["--config-dir", str(tmp_path), "experiment=own"]
    with pytest.raises(ConfigError) as caught:
        hydra_arguments(line)
    (problem,) = caught.value.problems
    assert [word for word in arguments if word not in problem] == []
    file.write_text(
        '# @package _global_\nname: "1e5"\nseed: 1_0\noptimizer: {lr: 1e-5}\nrun: {steps: 1, epochs: null}\n'
    )
    assert hydra_arguments(line)
