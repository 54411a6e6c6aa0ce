"""Tests mistakes of a user: each error names key, value and fix."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from relax_core.config.compose import compose, load_config, typed_config
from relax_core.config.errors import ConfigError
from relax_core.config.options import yaml_options
from relax_core.config.ranges import REAL_BYTES, usual_problems
from relax_core.config.validate import problems_of
from relax_core.preflight import CHECKS, settle


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, checks=CHECKS, settle=settle)
    return caught.value.problems


LOCKSTEP = ["env=number_guess", "reward=env", "mode.max_staleness=0", "rollout.lockstep=true"]


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("modality=omni", "modality=omni does not exist. Here it is modality=auto"),
        ("algo=foo", "algo=foo does not exist. What exists for algo: cispo, dapo, distill, dpo, dr_grpo, grpo,"),
        ("mode=foo", "mode=foo does not exist. What exists for mode: async, colocate."),
        ("bus=foo", "bus=foo does not exist. What exists for bus: ray, transfer_queue."),
        ("launcher=slrm", "launcher=slrm does not exist. Nearest: slurm. What exists for launcher: local, ray_job,"),
        ("parallel=tp9", "parallel=tp9 does not exist. Here it is parallel.tp=9. What exists for parallel: cp2,"),
        ("parallel.forward.tpp=2", "parallel.forward.tpp is not a key. Nearest: parallel.forward."),
        ("+parallel.forward.zz=2", "parallel.forward.zz is not a key."),
        ("parallel.reference.tp=2", "parallel.reference.tp is not a key any more. Both have the layout"),
        ("mode=asinc", "Nearest: async."),
        ("experiment=none", "experiment=none does not exist. What exists for experiment: calculator,"),
        ("lr=3", "lr is not a key. Nearest: optimizer.lr."),
        ("max_stalenes=3", "Nearest: mode.max_staleness."),
        ("zzzz=3", "zzzz is not a key. Root keys: name, seed,"),
        ("run.zzzz=3", "run.zzzz is not a key. Keys of run: run.steps"),
        ("+run.zzzz=3", "run.zzzz is not a key. Keys of run: run.steps"),
        ("+zzzz=3", "zzzz is not a key. Root keys: name, seed,"),
        ("algo.clip_hihg=0.3", "algo.clip_hihg is not a setting of grpo. Nearest: algo.clip_high"),
        ("optimizer.lr=fast", "optimizer.lr=fast: expected a number."),
        ("algo.group_size=many", "algo.group_size=many: expected a whole number."),
        ("seed=null", "seed=null: it needs a value."),
        ("mode.name=async", "Choose it with mode=<option>: async, colocate."),
        ("optimizer.schedule=step", "optimizer.schedule=step: expected one of constant, cosine, linear."),
        ("engine.weight_transport=cuda_ipc", "engine.weight_transport=cuda_ipc is not built yet. Use"),
        ("engine.weight_transport=nccl", "nccl: NCCL needs trainer and engines on GPUs."),
        ("engine.weight_transport=tcp", "engine.weight_transport=tcp: expected one of auto, shared_memory, gloo,"),
        ("run=[1]", "run is a section, not a value. Its keys: run.steps,"),
        ("foo", "'foo' is not key=value."),
        ("doctr", "Commands: train, demo, rerun, eval, engines, stall, notify, list, explain,"),
        ("seed=[1", "'seed=[1' is not key=value."),
        ("seed=1,2", "seed=1,2: several values. Add -m"),
        ("name=${nope}", "name: Interpolation key 'nope' not found."),
        ("run.steps=???", "run.steps has no value: add run.steps=..."),
        ("~run.steps", "run.steps cannot be removed, only set."),
        ("algo=plugin", "algo.name has no value"),
        ("env.name=nowhere", "env.name=nowhere is not known. What exists: agent, calculator, gymnasium, mcp,"),
        ("reward.name=maths", "Nearest: math."),
        ("algo.name=/nowhere/x.py", "algo.name=/nowhere/x.py: no such file."),
    ],
)
def test_what_cannot_be_composed(override: str, text: str) -> None:
    found = problems(override)
    assert len(found) == 1
    assert text in found[0]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["mode=colocate", "mode.max_staleness=1"], "mode.max_staleness=1 with mode=colocate"),
        (["mode=colocate", "rollout.workers=2"], "rollout.workers=2 with mode=colocate: the engine gives its"),
        (["rollout.workers=9"], "rollout.workers=9 is more than rollout.prompts_per_step=8: a step has no prompt"),
        (["rollout.workers=65"], "rollout.workers=65: must be at least 1 and at most 64"),
        (["algo.mini_batches=0"], "algo.mini_batches=0: at least one update a train step."),
        (["algo.epochs=0"], "algo.epochs=0: at least one time that a prompt is trained on."),
        (["algo.mini_batches=3"], "rollout.prompts_per_step=8 does not divide into algo.mini_batches=3."),
        (["algo.old_logprobs=current", "algo.epochs=2"], "algo.old_logprobs=current with algo.mini_batches=1,"),
        (["optimizer.critic_lr=1e-3"], "optimizer.critic_lr=0.001 with algo=grpo, which has no critic."),
        (["algo=ppo", "optimizer.critic_lr=0"], "optimizer.critic_lr=0.0: must be more than 0. null takes"),
        (["algo=ppo", "algo.gae_lambda=2"], "algo.gae_lambda=2.0: must lie in [0, 1]."),
        (["algo=sft", "rollout.temperature=0.8"], "rollout.temperature=0.8 with algo=sft"),
        (["algo=sft", "rollout.top_p=0.9"], "rollout.top_p, top_k or min_p with algo=sft"),
        (["algo=sft", "rollout.over_sampling=1.5"], "rollout.over_sampling=1.5 with algo=sft"),
        (["algo=sft", "data.overlong=truncate_left"], "data.overlong=truncate_left with algo=sft"),
        (["algo=sft", "run.keep_best=eval/exact"], "run.keep_best=eval/exact with algo=sft"),
        (["algo=sft", "env=number_guess"], "env=number_guess with algo=sft"),
        (["model.lora.rank=33"], "model.lora.rank=33"),
        (["model=tiny_qwen3_moe", "model.lora.rank=4", "model.lora.targets=[up_proj]"], "model.lora.targets=[up_proj]"),
        (["algo=kto", "eval.rows=1"], "eval.rows=1 with algo=kto"),
        (["algo=kto", "algo.epochs=2"], "algo.epochs=2 with algo=kto"),
        (["algo=dpo"], "data.task=reverse_digits: a generated task has prompts with answers, and no pairs"),
        (["parallel.tp=3"], "parallel.tp=3 does not divide the model's 4 attention heads, 2 key-value heads, "),
        (["parallel.ep=2"], "parallel.ep=2, parallel.etp=1: the model has no experts."),
        (["parallel.vpp=2"], "parallel.vpp=2 with parallel.pp=1: there are no stages to interleave."),
        (["parallel.tp=2", "parallel.shard_media=true"], "parallel.shard_media=true without a tower: the model"),
        (["parallel.cp=1", "parallel.shard_media=true"], "parallel.shard_media=true with parallel.tp=1 x cp=1"),
        (["parallel.first_stage_layers=1"], "parallel.first_stage_layers=1 with parallel.pp=1: the only stage has"),
        (["parallel.first_stage_layers=0"], "parallel.first_stage_layers=0: must be at least 1"),
        (["model=tiny_qwen3_vl", "parallel.pp=2", "parallel.first_stage_layers=1"], "the vision tower's outputs"),
        (["parallel.overlap=true"], "Set parallel.distributed_optimizer=true."),
        (["model=tiny_qwen3_moe", "parallel.tp=2"], "Set parallel.sequence_parallel=true."),
        (["algo.old_logprobs=actor_fwd", "parallel.forward.pp=3"], "parallel.forward.pp=3 does not divide"),
        (["parallel.forward.tp=0"], "parallel.forward.tp=0: must be at least 1."),
        (["parallel.dp=3"], "rollout.prompts_per_step=8 does not divide among parallel.dp=3 ranks."),
        (["model=qwen3"], "model.path is not set: model=qwen3 needs model.path="),
        (["model.path=/models/x"], "model.path=/models/x with model=tiny_qwen3, which is built in."),
        (["model=qwen3", "model.path=/usr"], "model.path=/usr: the folder has no config.json."),
        (["algo.routing_replay=true"], "algo.routing_replay=true: model=tiny_qwen3 has no experts."),
        (["model.moe_aux_loss_coef=0.01"], "model.moe_aux_loss_coef=0.01: model=tiny_qwen3 has no experts."),
        (["model=tiny_qwen3_moe", "model.moe_aux_loss_coef=-1"], "model.moe_aux_loss_coef=-1.0: must be at least 0"),
        (["engine.dtype=int8"], "engine.dtype=int8: expected null (model.dtype), or one of float32, bfloat16."),
        (["model.family=phi3"], "model.family=phi3 is not known. What exists: llama, mistral, qwen2,"),
        (["model.dtype=float8"], "model.dtype=float8: expected one of float32, bfloat16, auto."),
        (["model.builtin=huge"], "model.builtin=huge"),
        (["model.task=chess"], "model.task=chess: tiny_qwen3 has no warm start for it. What exists:"),
        (["data=file", "reward=math", "model.task=arithmetic"], "data.path is not set"),
        (["data=reverse_digits", "data.paths=[/x.jsonl]"], "data.paths=['/x.jsonl'] with data=reverse_digits,"),
        (["data=file", "data.path=/x.jsonl", "data.paths=[/y.jsonl]"], "Name all files in data.paths alone."),
        (["data=file", "data.paths=/x.jsonl", "reward=math"], "data.paths=/x.jsonl: it names no file. Give a list"),
        (["data.max_bad_rows=1"], "data.max_bad_rows=1.0: must be at least 0 and less than 1 (a share of all rows"),
        (["data.chat_template_kwargs.thinking=false"], "does not read data.chat_template_kwargs.thinking; it reads"),
        (["optimizer.warmup_steps=9", "run.steps=8"], "optimizer.warmup_steps=9 is more than run.steps=8"),
        (["optimizer.warmup_steps=-1"], "optimizer.warmup_steps=-1: must be at least 0. null takes 10, or run.steps"),
        (["run.steps=0"], "run.steps=0: must be at least 1 (relax eval evaluates without training)."),
        (["run.keep_best=eval/pass@4", "eval.samples=2", "eval.temperature=1"], "eval/pass@2."),
        (["run.keep_best=eval/exact", "eval.every=0"], "run.keep_best=eval/exact with eval.every=0: nothing is"),
        (["run.patience=3"], "run.patience=3: name the metric that must improve, e.g. run.keep_best=eval/exact."),
        (["eval.samples=4"], "eval.samples=4 with eval.temperature=0: greedy answers to a prompt are all equal."),
        (["eval.samples=300", "eval.temperature=1"], "eval.samples=300: must be at least 1 and at most 256"),
        (["eval.sets={a/b: null}"], "eval.sets: 'a/b' is not a name for a set."),
        (["eval.sets.gsm=/nowhere.jsonl"], "data file /nowhere.jsonl: no such file."),
        (["rollout.stop=['']"], "rollout.stop has an empty string"),
        ([f"rollout.stop=[{'x' * 1025}]"], "rollout.stop has a string of 1025 bytes. Give 1024 at most."),
        (["data=reverse_digits", "data.path=/x.jsonl"], "data.path=/x.jsonl with data=reverse_digits, which is"),
        (["data.last_assistant=drop"], "data.last_assistant=drop with data=reverse_digits, which is generated"),
        (["data.last_assistant=keep"], "data.last_assistant=keep: expected one of drop, continue."),
        (["data.template_date=today"], "data.template_date=today: expected a day, such as 2026-11-28."),
        (["data.template_date=20261128"], "data.template_date=20261128: expected a day"),
        (["data.task=chess", "model.task=arithmetic", "reward=math"], "data.task='chess': no such generated task."),
        (["data=arithmetic"], "reward=reverse_digits does not score data=arithmetic: it scores only reverse_digits"),
        (["eval.rows=999"], "eval.rows=999, but data.eval_size=256 holds out 256 rows"),
        (["env=number_guess", "env.max_turns=0"], "env.max_turns=0: an episode has at least one turn."),
        (["algo.credit=gigpo"], "algo.credit=gigpo with env=single_turn, which gives no state_key, so turns"),
        (["algo.credit=gigpo", "env=calculator", "reward=env"], "algo.credit=gigpo with env=calculator, which gives"),
        (["algo=ppo", "algo.credit=gigpo"], "algo.credit"),
        (["env=number_guess", "env.step_timeout_s=0"], "env.step_timeout_s=0.0: must be more than 0 seconds."),
        (["env=number_guess", "env.episode_timeout_s=-1"], "env.episode_timeout_s=-1.0: must be more than 0"),
        (
            ["env=number_guess", "engine.context_length=128", "env.max_observation_tokens=129"],
            "env.max_observation_tokens=129 is above engine.context_length=128, so an observation of",
        ),
        (["env=number_guess", "env.step_timeout_s=-1"], "env.step_timeout_s=-1.0: must be more than 0 seconds."),
        (["env=number_guess", "env.max_observation_tokens=0"], "env.max_observation_tokens=0: must be at least 1"),
        (["rollout.quorum=1.5"], "rollout.quorum=1.5: must be more than 0 and at most 1."),
        (["rollout.top_k=0"], "rollout.top_k=0 keeps no token."),
        (["rollout.top_k=1"], "rollout.top_k=1 keeps one token, with log-prob 0 for any weights"),
        (["rollout.min_p=1.0"], "rollout.min_p=1.0: must be at least 0 and less than 1 (0 keeps all tokens)."),
        (["rollout.over_sampling=0.9"], "rollout.over_sampling=0.9: must be at least 1 and at most 16 (1 admits"),
        (["rollout.quorum=0"], "rollout.quorum=0.0: must be more than 0 and at most 1."),
        (["rollout.quorum=0.5"], "rollout.quorum=0.5 with env=single_turn, which has single-turn episodes."),
        (["env=number_guess", "reward=env", "rollout.quorum=0.05"], "rollout.quorum=0.05 leaves a single episode"),
        (["rollout.lockstep=true", "mode.max_staleness=0"], "rollout.lockstep=true with env=single_turn, which"),
        (
            ["env=number_guess", "reward=env", "rollout.lockstep=true", "mode.max_staleness=2"],
            "rollout.lockstep=true with mode.max_staleness=2: the weights of a turn depend on timing.",
        ),
        ([*LOCKSTEP, "rollout.over_sampling=1.5"], "rollout.lockstep=true with rollout.over_sampling=1.5: the"),
        ([*LOCKSTEP, "rollout.workers=2"], "rollout.lockstep=true with rollout.workers=2: the groups of a worker"),
        ([*LOCKSTEP, "rollout.quorum=0.75"], "rollout.lockstep=true with rollout.quorum=0.75: the trained episodes"),
        (["env=textarena", "env.game=Mastermind-v0", *LOCKSTEP[1:]], "env.workers=1 with"),
        (["rollout.over_sampling=1.5", "rollout.surplus=keep", "mode.max_staleness=0"], "rollout.surplus=keep with"),
        (["optimizer.lr=-1"], "optimizer.lr=-1.0: must be more than 0."),
        (["optimizer.min_lr_ratio=2"], "optimizer.min_lr_ratio=2.0"),
        (["engine.port=70000"], "engine.port=70000: must be at least 0 and at most 65535"),
        (["engine.port=65535", "engine.count=2"], "passes port 65535"),
        (["engine.name=vllm"], "engine.name=vllm does not exist. Here it is engine=sglang, or engine=embedded on a"),
        (["engine.max_running_samples=8"], "engine.max_running_samples=8 cannot hold one group of"),
        (["engine.context_length=8"], "engine.context_length=8 leaves no room for a prompt"),
        (["engine.max_total_tokens=64"], "engine.max_total_tokens=64 cannot hold one group"),
        (["engine.tp=2"], "engine.tp=2: engine=embedded is one process on CPU cores. Use engine.tp=1,"),
        (["plan=ture"], "plan=ture: expected true, json, rehearse, rehearse_json or false."),
        (["placement=tpu"], "placement=tpu does not exist. What exists for placement: cpu, gpu, one_gpu."),
        (["run.dir=/etc/passwd/x"], "run.dir=/etc/passwd/x: /etc/passwd is a file."),
        (["reward.timeout_s=0"], "reward.timeout_s=0.0"),
    ],
)
def test_what_cannot_run(overrides: list[str], text: str) -> None:
    found = problems(*overrides)
    assert any(text in problem for problem in found), found


def test_all_problems_at_once() -> None:
    found = problems("seed=-1", "rollout.temperature=0", "parallel.tp=3", "resume=/nowhere", "algo.group_size=1")
    assert [any(key in p for p in found) for key in ("seed=-1", "temperature", "tp=3", "resume", "group_size")] == [
        True
    ] * 5
    report = ConfigError(found).report()
    assert report.startswith(f"relax: {len(found)} problems in the configuration\n  - ")


def test_all_wrong_config_at_once() -> None:
    assert len(problems("algo.clip_low=x", "algo.nope=1", "reward.nope=2", "+run.zzzz=1")) == 4


def test_model_folder(model_folder: Path) -> None:
    def found() -> list[str]:
        return problems(
            "model=qwen3", f"model.path={model_folder}", "engine.context_length=512", "rollout.max_new_tokens=8"
        )

    config = json.loads((model_folder / "config.json").read_text())
    (built_in,) = problems(f"model.path={model_folder}")
    assert built_in.endswith("with model=tiny_qwen3, which is built in. Choose model=qwen3.")
    (model_folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    assert problems(f"model.path={model_folder}")[0].endswith("Choose model=llama.")
    assert found()[0].endswith("its model_type is 'llama', and model.family=qwen3. Use model=llama.")
    (model_folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    assert "engine.context_length=512 is more than the model's 100 positions." in found()[0]
    (model_folder / "config.json").write_text("{oops")
    assert "config.json is not JSON" in found()[0]
    (model_folder / "config.json").write_text(json.dumps(config))
    (model_folder / "model.safetensors").unlink()
    (model_folder / "tokenizer.json").unlink()
    (model_folder / "tokenizer_config.json").unlink()
    assert ["safetensors" in found()[0], "no tokenizer" in found()[1]] == [True, True]


def test_data_file(tmp_path: Path, data_file: Path) -> None:
    def found(path: Path, *overrides: str) -> str:
        keys = ("data.prompt_key=prompt", "data.answer_key=answer", *overrides)
        return problems("experiment=math_file", f"data.path={path}", *keys)[0]

    assert "none.jsonl: no such file." in found(tmp_path / "none.jsonl")
    text = tmp_path / "rows.txt"
    text.write_text("a,b\n")
    assert "unknown suffix '.txt'. Use one of: .jsonl, .json, .csv, .parquet, .arrow, .jsonl.gz," in found(text)
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert "empty.jsonl: it has no rows." in found(empty)
    data_file.write_text("{oops\n" + data_file.read_text())
    assert "rows.jsonl, line 1: not a JSON object" in found(data_file, "data.max_bad_rows=0")
    message = "237 of the 237 checked rows cannot be used, more than data.max_bad_rows=0.05. The first: row 0:"
    assert message in found(data_file, "data.prompt_key=question")
    load_config(
        [f"data.path={data_file}", "experiment=math_file", "data.prompt_key=prompt", "data.answer_key=answer"],
        checks=CHECKS,
    )


def test_a_folder_that_is_removed_while_it_is_looked_at_is_no_problem(tmp_path: Path) -> None:
    """Folders above run.dir may disappear at any moment, for example when another run ends or is deleted."""
    above = tmp_path / "runs"
    above.mkdir()
    config = load_config([f"run.dir={above}/name/now"])
    looked: list[object] = []

    def remove(frame: object, event: str, function: object) -> None:
        if event == "c_return" and function in (os.stat, os.open) and above.exists():
            looked.append(function)
            above.rmdir()

    sys.setprofile(remove)
    try:
        found = problems_of(config)
    finally:
        sys.setprofile(None)
    assert looked and found == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permissions_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be written to" in problems(f"run.dir={tmp_path}/run")[0]


def test_port_in_use() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert problems(f"engine.port={port}")[0].startswith(
            f"engine.port={port} cannot be used (Address already in use)"
        )


def test_ray_address() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        (silent,) = problems(f"launcher.ray_address={address}")
        assert silent.startswith(f"launcher.ray_address={address}: no server listens there (Connection refused). Start")
        held.listen()
        assert load_config([f"launcher.ray_address={address}"], checks=CHECKS).launcher.ray_address == address
    for address in ("head", "ray://head:10001", "head:port"):
        (malformed,) = problems(f"launcher.ray_address={address}")
        assert malformed.startswith(f"launcher.ray_address={address} is not a host:port of a Ray head. ")


def test_malformed_yaml_names_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "mine.yaml").write_text("# @package _global_\nrun: {steps: 3\nseed: 1\n")
    found = problems("experiment=mine", f"hydra.searchpath=[file://{tmp_path}]")[0]
    assert "mine.yaml, line 3: not valid YAML" in found


def test_unknown_key_in_an_experiment_file(tmp_path: Path) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "mine.yaml").write_text("# @package _global_\noptimizer: {lrr: 3}\n")
    assert (
        "in experiment/mine.yaml: optimizer.lrr is not a key. Nearest: optimizer.lr"
        in problems("experiment=mine", f"hydra.searchpath=[file://{tmp_path}]")[0]
    )


def test_a_critic_without_a_loss_is_refused(tmp_path: Path) -> None:
    plugin = tmp_path / "no_value_loss.py"
    plugin.write_text(
        "import dataclasses\nfrom algorithms import ppo\n"
        "SPEC = dataclasses.replace(ppo.SPEC, name='no_value_loss', value_loss=None)\n"
    )
    (problem,) = problems("algo=plugin", f"algo.name={plugin}")
    assert problem == f"algo.name={plugin}: it needs a critic, but its SPEC has no value_loss. Give it one."


def test_ppo_may_have_groups_of_one() -> None:
    config = load_config(["algo=ppo", "algo.group_size=1", "optimizer.critic_lr=5e-3"], checks=CHECKS)
    assert (config.algo.group_size, config.optimizer.critic_lr) == (1, 5e-3)


def test_the_demos_learning_rate_with_a_real_model_is_refused(model_folder: Path) -> None:
    keys = ["model=qwen3", f"model.path={model_folder}", "rollout.max_new_tokens=8", "optimizer.lr=8e-4"]
    load_config(keys)  # a tiny model folder
    with (model_folder / "more.safetensors").open("wb") as file:
        file.truncate(REAL_BYTES)  # a sparse file, so it takes no space
    with pytest.raises(
        ConfigError, match=r"optimizer.lr=0.0008: runs use at most 0.0001 .*run.confirm=\[optimizer.lr\]"
    ):
        load_config(keys)
    load_config([*keys, "run.confirm=[optimizer.lr]"])
    with pytest.raises(ConfigError, match=r"optimizer.lr=0.0008"):
        load_config(["model=qwen3", "model.shape=Qwen3-4B", "optimizer.lr=8e-4"])


def test_no_value_that_relax_ships_needs_a_confirmation() -> None:
    for group in ("algo", "experiment", "model", "mode"):
        for option in yaml_options(group):
            if (group, option) not in (("algo", "plugin"), ("experiment", "qwen3_omni")):
                assert list(usual_problems(typed_config(compose([f"{group}={option}"])))) == []
