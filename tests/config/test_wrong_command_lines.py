"""Tests wrong command lines of new users: each is refused with the key and the correct form before anything starts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from relax_core.__main__ import main
from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.config.hydra_overrides import CommandLine
from relax_core.preflight import CHECKS, settle

ROWS = "data.path=ROWS model.task=arithmetic data.eval_size=1 eval.rows=1 rollout.prompts_per_step=2"
# The line as typed in a shell, then the key and the correct form that the message must contain.
LINES = [
    # typing errors in keys
    ("run.stesp=3", "run.stesp", "run.steps"),
    ("lr=1e-5", "lr", "optimizer.lr"),
    ("optimizer.learning_rate=1e-5", "optimizer.learning_rate", "optimizer.lr"),
    ("rollout.max_tokens=64", "rollout.max_tokens", "rollout.max_new_tokens"),
    ("algo.clip_hi=0.3", "algo.clip_hi", "algo.clip_high"),
    ("algo.kl=0.1", "algo.kl", "algo.kl_coef"),
    ("algo.beta=0.1", "algo.beta", "algo.kl_coef"),
    ("mode.staleness=2", "mode.staleness", "mode.max_staleness"),
    ("eval.frequency=10", "eval.frequency", "eval.every"),
    ("algos=ppo", "algos", "algo"),
    ("run.steps 10", "run.steps", "run.steps=VALUE"),
    ("run.steps:10", "run.steps:10", "run.steps=VALUE"),
    # typing errors in values
    ("seed=x", "seed=x", "whole number"),
    ("seed=1.5", "seed=1.5", "whole number"),
    ("run.steps=10k", "run.steps=10k", "whole number"),
    ("run.steps=1,000", "run.steps=1,000", "run.steps=1000"),
    ("optimizer.lr=0,001", "optimizer.lr=0,001", "optimizer.lr=0.001"),
    ("optimizer.lr=1e-6,", "optimizer.lr", "a number"),
    ("optimizer.lr=1e-6x", "optimizer.lr=1e-6x", "a number"),
    ("optimizer.lr=-1e-6", "optimizer.lr=-1e-06", "more than 0"),
    ("optimizer.lr=nan", "optimizer.lr=nan", "more than 0"),
    ("algo.kl_coef=nan", "algo.kl_coef=nan", "finite"),
    ("algo.clip_high=inf", "algo.clip_high=inf", "finite"),
    ("reward=math data=arithmetic reward.timeout_s=nan", "reward.timeout_s=nan", "finite"),
    ("'algo.rejection={token_ratio: [nan, 2.0]}'", "algo.rejection.token_ratio=nan", "number"),
    ("run.panel=maybe", "run.panel=maybe", "true or false"),
    ("optimizer.schedule=cos", "optimizer.schedule=cos", "cosine"),
    ("name=null", "name=null", "needs a value"),
    ("plan=yes", "plan=yes", "true"),
    ("resume=true", "resume=", "resume=auto"),
    ("rollout.stop=foo", "rollout.stop=foo", "'rollout.stop=[\"foo\"]'"),
    ("'rollout.stop=</answer>'", "rollout.stop", "'rollout.stop=[\"</answer>\"]'"),
    ("eval.sets=a.jsonl", "eval.sets", "eval.sets={NAME: VALUE}"),
    ("'eval.sets={sums: {path: a.jsonl}}'", "eval.sets.sums={'path': 'a.jsonl'}", "eval.sets.sums=FILE"),
    ("'eval.sets={sums: [a.jsonl]}'", "eval.sets.sums=['a.jsonl']", "or null"),
    ("'eval.sets={数据: a.jsonl}'", "eval.sets", "ASCII"),
    ("=3", "=3", "key=value"),
    ("name=", "name=", "Give a name"),
    ("rollout.stop=", "rollout.stop=", "'rollout.stop=[]'"),
    ("run.steps==10", "run.steps", "a whole number"),
    ("algo=grpo,ppo", "algo=grpo,ppo", "Add -m"),
    ("algo.aggregation=mean", "algo.aggregation=mean", "token_mean"),
    ("model.dtype=fp16", "model.dtype=fp16", "bfloat16"),
    ("model.freeze=[embedding]", "model.freeze", "vision"),
    ("notify.events=[done]", "notify.events", "finished"),
    ("engine=sglang engine.urls=http://x:1", "engine.urls", '["http://x:1"]'),
    # out of range, or beyond the values of every real run
    ("rollout.top_p=1.5", "rollout.top_p=1.5", "at most 1"),
    ("rollout.temperature=0", "rollout.temperature=0", "at least"),
    ("algo.group_size=1", "algo.group_size=1", "2 or more"),
    ("mode.max_staleness=-1", "mode.max_staleness=-1", "at least 0"),
    ("engine.port=99999", "engine.port=99999", "65535"),
    ("optimizer.lr=1", "optimizer.lr=1.0", "run.confirm=[optimizer.lr]"),
    ("algo.clip_high=28", "algo.clip_high=28", "run.confirm=[algo.clip_high]"),
    ("mode.max_staleness=1000000", "mode.max_staleness=1000000", "run.confirm=[mode.max_staleness]"),
    ("rollout.temperature=100", "rollout.temperature=100", "run.confirm=[rollout.temperature]"),
    ("optimizer.weight_decay=10", "optimizer.weight_decay=10", "run.confirm=[optimizer.weight_decay]"),
    ("run.confirm=[optimizer.lrr]", "run.confirm", "optimizer.lr"),
    # invalid combinations, and unread settings
    ("run.epochs=3 run.steps=10", "run.steps=10", "run.epochs=null"),
    ("data.answer_key=label", "data.answer_key=label", "data=file"),
    ("data.prompt_key=问题", "data.prompt_key=问题", "data=file"),
    ("data.media_keys.image=images", "data.media_keys.image=images", "data=file"),
    (f"{ROWS} data=file reward=math data.size=100", "data.size=100", "Drop data.size"),
    ("'notify.rules=[\"actor/rewrad < 1 for 2 steps\"]'", "actor/rewrad", "actor/reward"),
    ("'notify.rules=[\"policy/reward < 1 for 2 steps\"]'", "policy", "actor"),
    ("'notify.rules=[\"eval/exact < 1 for 2 steps\"]' eval.every=0", "eval.every=0", "Set eval.every"),
    ("mode=colocate mode.max_staleness=2", "mode.max_staleness=2", "mode=async"),
    ("optimizer.critic_lr=1e-5", "optimizer.critic_lr", "algo=ppo"),
    ("rollout.prompts_per_step=8 algo.mini_batches=3", "algo.mini_batches=3", "multiple of 3"),
    ("launcher.max_requeues=5", "launcher.max_requeues", "launcher=slurm"),
    ("run.keep_best=eval/accuracy", "run.keep_best=eval/accuracy", "eval/exact"),
    # files and folders
    ("data.path=/nowhere.jsonl model.task=arithmetic", "/nowhere.jsonl", "no such file"),
    ("data=rows.jsonl", "data=rows.jsonl", "data.path=rows.jsonl"),
    ("data=/x/rows.parquet", "data=/x/rows.parquet", "data.path=/x/rows.parquet"),
    ("model=qwen3 model.path=/nowhere", "model.path=/nowhere", "no such folder"),
    ("model=/usr", "model=/usr", "model=folder model.path=/usr"),
    ("model=Qwen/Qwen3-0.6B", "model=Qwen/Qwen3-0.6B", "model.path=Qwen3-0.6B"),
    ("model=qwen3 model.path=Qwen/Qwen3-0.6B", "model.path", "hf download Qwen/Qwen3-0.6B"),
    ("model=qwen3.5", "model=qwen3.5", "qwen3_5"),
    ("resume=/nowhere", "resume=/nowhere", "resume=auto"),
    ("run.dir=", "run.dir", "Give a path"),
    ("reward=my_reward.py", "reward=my_reward.py", "reward.name=my_reward.py"),
    ("reward.name=/nowhere.py", "reward.name=/nowhere.py", "no such file"),
    # conventions of other frameworks
    ("mode=sync", "mode=sync", "mode=colocate"),
    ("algo=pretrain", "algo=pretrain", "algo=sft"),
    ("engine=vllm", "engine=vllm", "engine=sglang"),
    ("tracker=tensorboard", "tracker=tensorboard", "tracker.tensorboard"),
    ("model.lora.rank=-1", "model.lora.rank=-1", "at least 0"),
    ("model.lora.rank=8 model.lora.alpha=0", "model.lora.alpha=0", "32"),
    ("model.lora.rank=8 model.lora.targets=[c_attn]", "model.lora.targets", "q_proj"),
    ("model.lora.rank=8 model.lora.targets=[]", "model.lora.targets=[]", "q_proj"),
    (
        "model.lora.rank=8 model.freeze=[vision] model=tiny_qwen3_vl data=see",
        "model.freeze=[vision]",
        "Drop model.freeze",
    ),
    ("model.lora.rank=8 model=tiny_qwen3_moe model.moe_aux_loss_coef=0.01", "model.moe_aux_loss_coef=0.01", "Use 0"),
    ("lora_alpha=16", "lora_alpha", "model.lora.alpha"),
    ("load_in_4bit=true", "load_in_4bit", "model.lora.rank"),
    ("trainer=fsdp", "trainer", "Megatron"),
    ("trainer.total_epochs=15", "trainer.total_epochs", "run.epochs"),
    ("trainer.n_gpus_per_node=8", "trainer.n_gpus_per_node", "placement.gpus_per_node"),
    ("data.train_batch_size=512", "data.train_batch_size", "rollout.prompts_per_step"),
    ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n", "algo.group_size"),
    ("actor_rollout_ref.actor.fsdp_config.param_offload=true", "fsdp_config", "parallel.dp"),
    ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator", "algo=grpo"),
    ("rollout.n=8", "rollout.n", "algo.group_size"),
    ("engine.tensor_parallel=2", "engine.tensor_parallel", "parallel.tp"),
    ("wandb.project=x", "wandb.project", "tracker=wandb"),
    ("tracker=wandb tracker.project=x", "tracker.project", "tracker.sinks.wandb.project"),
    ("launcher=k8s", "launcher=k8s", "launcher=ray_job"),
    ("algo=reinforce", "algo=reinforce", "algo=reinforce_pp"),
    ("-n 3", "-n", "key=value"),
    ("--lr 1e-6", "--lr", "optimizer.lr=1e-6"),
    ("--learning_rate 1e-6", "--learning_rate", "optimizer.lr=1e-6"),
    ("--num_generations 8", "--num_generations", "algo.group_size=8"),
    ("--num_train_epochs=3", "--num_train_epochs", "run.epochs=3"),
    ("--max-completion-length 512", "--max-completion-length", "rollout.max_new_tokens=512"),
    ("--use_peft", "--use_peft", "model.lora.rank"),
    ("--seed 3", "--seed", "seed=3"),
    ("--model qwen3", "--model", "model=qwen3"),
    ("--config mine.yaml", "--config", "--config-dir FOLDER experiment=mine"),
    ("mine.yaml", "mine.yaml", "--config-dir FOLDER experiment=mine"),
    ("mine/experiment/own.yaml", "own.yaml", "--config-dir mine experiment=own"),
    ("--config-dir /nowhere experiment=own", "--config-dir /nowhere", "no such folder"),
    # A second table. It was written only from the docs, before the messages were known.
    ("optimizer.lr=inf", "optimizer.lr=inf", "finite"),
    ("rollout.max_new_tokens=0", "rollout.max_new_tokens=0", "at least 1"),
    ("rollout.max_new_tokens=100000", "rollout.max_new_tokens=100000", "Lower rollout.max_new_tokens"),
    ("algo.clip_low=0.2,0.28", "algo.clip_low=0.2,0.28", "one number, such as algo.clip_low=0.2"),
    ("optimizer.warmup_steps=1000 run.steps=20", "optimizer.warmup_steps=1000", "optimizer.warmup_steps=20"),
    ("optimizer.lr = 1e-6", "'='", "without blanks"),
    ("rows.jsonl", "rows.jsonl", "data=file data.path=rows.jsonl"),
    ("data.path=[a.jsonl,b.jsonl]", "data.path", "data.paths=[a.jsonl,b.jsonl]"),
    ("data=file", "data=file", "data.path=FILE"),
    ("reward=accuracy,format", "reward=accuracy,format", "reward=mix"),
    ("model=qwen3-0.6b", "model=qwen3-0.6b", "model=qwen3 model.path=FOLDER"),
    ("model=qwen2.5-7b", "model=qwen2.5-7b", "model=qwen2 model.path=FOLDER"),
    ("parallel=fsdp", "parallel=fsdp", "parallel=dp2"),
    ("parallel.tensor_model_parallel_size=2", "tensor_model_parallel_size", "parallel.tp"),
    ("trainer.val_before_train=true", "trainer.val_before_train", "eval.every=0"),
    ("++optimizer.name=adamw", "optimizer.name", "AdamW"),
    ("'optimizer={lr: 1e-6, betas: [0.9, 0.95]}'", "optimizer.betas", "optimizer.beta2"),
    ("device=cuda", "device", "placement=gpu"),
    ("launcher=slurm launcher.time=2h", "launcher.time", "launcher.time_limit_min"),
    ("report_to=wandb", "report_to", "tracker=wandb"),
    ("resume=/usr", "resume=/usr", "checkpoints/"),
    ("--model Qwen/Qwen3-0.6B", "--model", "model.path=Qwen3-0.6B"),
    ("--data rows.jsonl", "--data", "data=file data.path=rows.jsonl"),
    ("--dry-run", "--dry-run", "plan=true"),
    ("agent.command=python my_agent.py", "my_agent.py", "quotes"),
    ("help", "help", "relax --help"),
    ("mode=null", "mode=null", "colocate"),
    (f"{ROWS} data.eval_size=-1", "data.eval_size=-1", "at least 0"),
    ("rollout.banned_token_ids=151643", "rollout.banned_token_ids=151643", "rollout.banned_token_ids=[151643]"),
    ("grpo.max_num_steps=100", "grpo.max_num_steps", "run.steps"),
    ("loss_fn.reference_policy_kl_penalty=0.01", "reference_policy_kl_penalty", "algo.kl_coef"),
    ("finetuning_type=lora", "finetuning_type", "model.lora.rank"),
    ("cutoff_len=2048", "cutoff_len", "engine.context_length"),
    ("vllm_num_engines=2", "vllm_num_engines", "engine.count"),
    ("colocate_all_models=true", "colocate_all_models", "mode=colocate"),
    ("data.split=train", "data.split", "data.eval_path"),
    ("critic.model.path=x", "critic.model.path", "algo=ppo"),
    ("rollout.repetition_penalty=1.1", "rollout.repetition_penalty", "penalties"),
    ("sweep seed=1,2", "sweep", "relax -m"),
    ("stop run", "stop", "Ctrl-C"),
    ("algo=gpro", "algo=gpro", "Nearest: grpo"),
    ("optimizer.learningrate=1e-3", "optimizer.learningrate", "optimizer.lr"),
    ("parallel=tp4", "parallel=tp4", "parallel.tp=4"),
    ("policy.max_total_sequence_length=2048", "max_total_sequence_length", "engine.context_length"),
    ("algo.mini_batches=16", "algo.mini_batches=16", "1, 2, 4 or 8"),
    ("'optimizer.lr=[1e-3,3e-4]'", "optimizer.lr", "-m optimizer.lr=VALUE,VALUE"),
    ("optimizer.lr=1e-3, 3e-4", "optimizer.lr", "no blank"),
    ("modality=audio", "modality=audio", "data.media_keys"),
    ("optimizer.lr.value=1", "optimizer.lr", "optimizer.lr=VALUE"),
    ("reward=env", "reward=env", "env with turns"),
    ("--cfg yaml", "--cfg yaml", "--cfg job"),
    ("data.path=gone.jsonl model.task=arithmetic", "data.path", "gone.jsonl: no such file"),
    ("data.paths=[gone.jsonl] model.task=arithmetic", "data.paths", "gone.jsonl: no such file"),
    ("eval.sets.mine=gone.jsonl", "eval.sets.mine", "gone.jsonl: no such file"),
]
# The same for the other commands. They write to stderr.
COMMAND_LINES = [
    ("eval tiny_qwen3 optimizer.lr=1e-6", "optimizer.lr=1e-6", "Drop it"),
    ("eval tiny_qwen3 plan=true", "plan=true", "Drop it"),
    ("eval Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "hf download"),
    ("eval tiny_qwen3 mode=colocate", "mode=colocate", "Drop it"),
    ("trace /usr --out /nowhere/x.json", "/nowhere/x.json", "does not exist"),
    ("lineage /etc/passwd step=1", "/etc/passwd", "Give the folder of a run"),
    ("dashboard --port 99999", "--port=99999", "65535"),
    ("trace /usr --steps 3:1", "--steps=3:1", "A below B"),
    ("engines /usr", "/usr", "gateway=local"),
    ("list rewards", "rewards", "FILE.py"),
    ("explain optimizer lr", "optimizer lr", "optimizer.lr"),
    ("-h algo", "algo", "algo=OPTION --help"),
    ("agent.env=FOO=1", "agent.env", "agent.env.NAME=VALUE"),
    ("seed=1 seed=2 run.stesp=3", "seed is given twice", "seed=2"),
    ("export /usr/step_00000099 out", "/usr/step_00000099", "no such folder"),
    ("compare /nowhere", "/nowhere", "no such folder"),
    ("reward=mix plan=true", "reward.parts", "reward: math"),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file: Path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 8)
    return file


def plan(words: Sequence[str]) -> None:
    CommandLine.of(words)  # refuses flags, because load_config does not expect them
    load_config(words, checks=CHECKS, settle=settle)


@pytest.mark.parametrize(("line", "key", "fix"), LINES, ids=[line for line, _, _ in LINES])
def test_a_wrong_line_is_refused_with_the_right_form(line: str, key: str, fix: str, rows: Path) -> None:
    words = shlex.split(line.replace("ROWS", str(rows)))
    with pytest.raises(ConfigError) as caught:
        plan(words)
    message = "\n".join(caught.value.problems)
    assert key in message and fix in message


@pytest.mark.parametrize(("line", "key", "fix"), COMMAND_LINES, ids=[line for line, _, _ in COMMAND_LINES])
def test_a_wrong_line_of_another_command_is_refused(
    line: str, key: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code: str | int | None
    try:
        code = main(shlex.split(line))
    except SystemExit as end:
        code = end.code
    output = capsys.readouterr().err
    assert code and key in output and fix in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("line", "key", "why"),
    [
        ("algo.kl_estimator=k1", "algo.kl_estimator=k1", "algo.kl_coef=0"),
        ("eval.every=0 eval.rows=4", "eval.rows=4", "eval.every=0"),
    ],
)
def test_a_setting_that_nothing_reads_gets_a_warning(
    line: str, key: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*shlex.split(line), "plan=true"]) == 0
    output = capsys.readouterr().err
    assert f"warning: {key} is not read" in output and why in output


@pytest.mark.parametrize(
    "line",
    [
        "optimizer.lr=1 run.confirm=[optimizer.lr]",
        "algo.clip_high=28 mode.max_staleness=100 run.confirm=[algo.clip_high,mode.max_staleness]",
        "run.epochs=null run.steps=10",
        "notify.rules=['actor/algorithm/clip_fraction > 0.5 for 3 steps','rollout/reward/math/none > 0 for 1 step']",
    ],
)
def test_what_is_confirmed_or_fits_may_start(line: str) -> None:
    load_config([line] if line.startswith("notify") else line.split(), checks=CHECKS, settle=settle)
