"""Maps setting names of TRL (`GRPOConfig`) and verl (`ppo_trainer.yaml`) to the equivalent keys of Relax.

Dotted names are verl's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class EquivalentKeys:
    """Holds the keys of Relax for settings of other frameworks.

    ``keys`` are keys of Relax, or key=value if the setting corresponds to one value of a key. If there are no keys,
    ``note`` is a sentence about Relax's equivalent.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    note: str = ""


_POLICY = "actor_rollout_ref"
# KEYS < NAMES ELSEWHERE | NOTE. "-" means no key, "@" is verl's policy; indented lines continue the line above.
_TABLE = """\
optimizer.lr < learning_rate @.actor.optim.lr
optimizer.critic_lr < critic.optim.lr
optimizer.tower_lr < vision_lr vision_tower_lr
model.freeze < freeze_vision_tower @.actor.freeze_vision_tower freeze_modules
optimizer.schedule < lr_scheduler_type @.actor.optim.warmup_style lr_schedule
optimizer.warmup_steps < lr_warmup_steps @.actor.optim.lr_warmup_steps
optimizer.warmup_steps < warmup_ratio @.actor.optim.lr_warmup_steps_ratio | in train steps, not as a share of them
optimizer.beta2 < betas adam_betas optimizer.betas @.actor.optim.betas | the optimizer is AdamW
- < optim optimizer_type optimizer.name optimizer.type | The optimizer of every run is AdamW
optimizer.beta2 < adam_beta2
optimizer.eps < adam_epsilon
optimizer.clip_grad < max_grad_norm grad_clip @.actor.grad_clip
rollout.prompts_per_step < batch_size num_prompts_per_step train_batch_size data.train_batch_size rollout_batch_size
  generation_batch_size | it counts prompts; each becomes algo.group_size samples
parallel.micro_batch_tokens < per_device_train_batch_size micro_batch_size gradient_accumulation_steps
  @.actor.ppo_micro_batch_size_per_gpu @.actor.ppo_max_token_len_per_gpu | micro-batches are packed by tokens;
  rollout.prompts_per_step is the batch of a train step
algo.mini_batches < mini_batch_size ppo_mini_batch_size @.actor.ppo_mini_batch_size | the number of updates a train
  step, not the prompts in each
algo.epochs < num_iterations ppo_epochs @.actor.ppo_epochs
algo.group_size < num_generations n_samples_per_prompt @.rollout.n rollout.n
rollout.max_new_tokens < max_completion_length max_tokens max_response_length data.max_response_length response_length
  @.rollout.response_length
engine.context_length < max_prompt_length data.max_prompt_length max_length cutoff_len max_total_sequence_length
  max_model_len vllm_max_model_length @.rollout.prompt_length @.rollout.max_model_len | tokens of prompt and response
  together
rollout.temperature < @.rollout.temperature
rollout.top_p < @.rollout.top_p
rollout.top_k < @.rollout.top_k
run.steps < max_steps max_num_steps total_training_steps trainer.total_training_steps num_steps
run.epochs < num_train_epochs total_epochs num_epochs trainer.total_epochs | passes over the training rows, in place
  of run.steps
run.dir < output_dir save_dir trainer.default_local_dir trainer.rollout_data_dir
run.save_every < save_steps save_freq trainer.save_freq
run.keep_last < save_total_limit trainer.max_actor_ckpt_to_keep
- < val_before_train | Every run evaluates before its first step, unless eval.every=0
eval.every < eval_steps test_freq trainer.test_freq
resume < resume_from_checkpoint trainer.resume_mode trainer.resume_from_path
name < run_name experiment_name trainer.experiment_name project_name
placement.gpus_per_node < n_gpus num_gpus gpus n_gpus_per_node trainer.n_gpus_per_node | choose placement=gpu
mode=colocate < colocate_all_models colocate
engine.count < vllm_num_engines num_engines rollout_num_engines
algo < stage train_type rl_algorithm | such as sft, dpo and grpo: relax list
- < template chat_template | The chat template is that of the tokenizer in model.path
- < data.split dataset_split | A split is a file: name it in data.path, or data.eval_path
- < max_samples max_train_samples train_max_samples | All rows of data.path are used, for run.steps or run.epochs;
  write fewer rows into the file
- < num_workers dataloader_num_workers | Rows are read without workers; rollout.workers is the number of rollout
  processes
- < critic.model.path critic_pretrain | The critic of algo=ppo starts from model.path
- < repetition_penalty presence_penalty frequency_penalty | Sampling has no penalties: the trainer could not compute
  their log-probs
placement=gpu < device device_map accelerator use_gpu cuda
launcher.time_limit_min < time walltime time_limit | minutes, with launcher=slurm
plan=true < dry_run dryrun | it shows what would run, and stops
placement.nodes launcher.nodes < nnodes num_nodes trainer.nnodes
parallel.tp < tensor_parallel_size tensor_parallel tensor_model_parallel_size
  @.actor.megatron.tensor_model_parallel_size
parallel.pp < @.actor.megatron.pipeline_model_parallel_size pipeline_parallel_size pipeline_model_parallel_size
engine.tp < vllm_tensor_parallel_size @.rollout.tensor_model_parallel_size
engine.mem_fraction < vllm_gpu_memory_utilization gpu_memory_utilization @.rollout.gpu_memory_utilization | with
  engine=sglang
engine=embedded engine=sglang < use_vllm vllm_mode @.rollout.name
mode.max_staleness < steps_per_generation staleness_threshold async_training.staleness_threshold | weight versions
  that a trained token may lag behind
algo=ppo algo=grpo < algorithm.adv_estimator adv_estimator | all of them: relax list
algo.aggregation < loss_type loss_agg_mode @.actor.loss_agg_mode
algo.clip_low algo.clip_high < clip_ratio cliprange clip_range clip_eps epsilon @.actor.clip_ratio | one for each side
algo.clip_low < clip_ratio_low epsilon_low @.actor.clip_ratio_low
algo.clip_high < clip_ratio_high epsilon_high @.actor.clip_ratio_high
algo.dual_clip < clip_ratio_c delta @.actor.clip_ratio_c
algo.kl_coef < beta reference_policy_kl_penalty kl_coeff kl_loss_coef use_kl_loss init_kl_coef @.actor.kl_loss_coef
  @.actor.use_kl_loss algorithm.kl_ctrl.kl_coef | above 0 it starts the reference model
algo.kl_placement < use_kl_in_reward algorithm.use_kl_in_reward
algo.kl_estimator < kl_loss_type @.actor.kl_loss_type algorithm.kl_penalty
algo.entropy_coef < entropy_coeff ent_coef @.actor.entropy_coeff
algo.normalize_std < scale_rewards algorithm.norm_adv_by_std_in_grpo
algo.gamma < algorithm.gamma | of algo=ppo
algo.gae_lambda < lam gae_lambda algorithm.lam | of algo=ppo
algo.value_clip < cliprange_value critic.cliprange_value | of algo=ppo
parallel.recompute < gradient_checkpointing enable_gradient_checkpointing
model.dtype < bf16 fp16 torch_dtype | float32, bfloat16 or auto
model.path < model_name_or_path model_name model_path @.model.path pretrained | a Hugging Face folder, with
  model=qwen3
data.path < dataset dataset_name train_files data.train_files prompt_data data_path | a file of rows, with data=file
data.eval_path < val_files data.val_files eval_dataset
reward.name < reward_funcs custom_reward_function.path reward_fn | a name, or a file's path
tracker.tensorboard < report_to logger trainer.logger | others by tracker=wandb, mlflow or clearml
tracker=wandb < wandb wandb_project use_wandb tracker.project | with tracker.sinks.wandb.project=NAME
model optimizer algo rollout engine parallel < @ | choose the group by topic
run eval placement tracker < trainer | choose the group by topic; Megatron trains every run, in the layout parallel.*
parallel.dp parallel.distributed_optimizer < fsdp fsdp_config fsdp_size strategy deepspeed zero_stage ddp | every run
  trains with Megatron; parallel=dp2_sharded shards the optimizer
model.lora.rank < lora lora_rank lora_r finetuning_type use_peft use_lora peft peft_config | above 0 it trains LoRA
  factors
model.lora.alpha < lora_alpha
model.lora.targets < target_modules lora_target lora_target_modules
model.lora.rslora < use_rslora
- < load_in_4bit load_in_8bit | Relax has no quantized training; model.lora.rank=32 needs little memory, too
data.prompt_key < prompt_field input_key prompt_column question_key
data.answer_key < label_key answer_field ground_truth_key solution_key
rollout.stop < stop_strings stop_words stop_sequences
algo < algorithm | relax algo=ppo --help lists what PPO has
reward < reward_model custom_reward_function
"""


def _meanings(table: str) -> Iterator[EquivalentKeys]:
    for row in table.replace("\n  ", " ").splitlines():
        keys, _, rest = row.partition(" < ")
        names, _, note = rest.replace("@", _POLICY).partition(" | ")
        yield EquivalentKeys(tuple(keys.replace("-", "").split()), tuple(names.split()), note)


MEANINGS = tuple(_meanings(_TABLE))
_BY_NAME = {name: meaning for meaning in MEANINGS for name in meaning.names}
# (group, option names of other frameworks) → the equivalent in Relax.
OPTIONS_ELSEWHERE = {
    ("mode", "sync on_policy onpolicy synchronous hybrid"): "mode=colocate, or mode=async mode.max_staleness=0",
    ("mode", "disaggregated off_policy fully_async"): "mode=async",
    ("algo", "rm reward_model"): "algo=dpo, which learns from pairs",
    ("algo", "pretrain"): "algo=sft with rows that have the column text",
    ("algo", "reinforce reinforce++ reinforce_plus_plus"): "algo=reinforce_pp",
    ("modality", "vision image video audio omni multimodal"): "modality=auto, which reads data.media_keys",
    ("engine", "vllm hf transformers trtllm lmdeploy"): "engine=sglang, or engine=embedded on a CPU",
    ("placement", "cuda gpus"): "placement=gpu",
    ("tracker", "tensorboard jsonl none console"): "tracker=default with tracker.tensorboard",
    (
        "parallel",
        "fsdp fsdp2 ddp zero zero3 deepspeed megatron",
    ): "parallel=dp2, or dp2_sharded with a sharded optimizer; every run trains with Megatron",
    ("launcher", "ray k8s kubernetes kuberay"): "launcher=ray_job",
    ("launcher", "sbatch srun"): "launcher=slurm",
    ("reward", "accuracy rule math_verify gsm8k"): "reward=math, or reward=exact_match",
    ("data", "gsm8k json jsonl parquet csv hf huggingface dataset"): "data=file data.path=FILE",
}
# Commands of other frameworks → the equivalent in Relax.
COMMANDS_ELSEWHERE = {
    "help init": "relax --help",
    "run start launch": "relax [train] [key=value ...]",
    "eval-model evaluate test": "relax eval MODEL|CHECKPOINT|RUN",
    "version": "relax --version",
    "sweep multirun": "relax -m seed=1,2,3",
    "plan": "relax plan=true",
    "config": "relax --cfg job",
    "serve follow logs status": "relax dashboard [FOLDER ...]",
    "ls": "relax list, or relax dashboard for the runs",
    "stop kill": "Ctrl-C in the terminal of the run, or kill -TERM PID of its process: it writes a checkpoint and ends",
    "play": "python -m relax_core.tools.play checkpoint=RUN",
    "merge convert": "relax export CHECKPOINT OUT",
    "resume": "relax run.dir=RUN resume=auto, with the keys of the run",
}


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


_BY_LETTERS = {_letters(name): meaning for name, meaning in _BY_NAME.items()}  # learningRate, learning-rate


def equivalent_keys_of(name: str) -> EquivalentKeys | None:
    """Returns the equivalent of a name; if the name is unknown, the equivalent of its last known dotted part."""
    parts = (name, *reversed(name.split(".")))
    found = next((_BY_NAME[part] for part in parts if part in _BY_NAME), None)
    return found or next((_BY_LETTERS[letters] for letters in map(_letters, parts) if letters in _BY_LETTERS), None)


def synonym(name: str) -> str | None:
    """Returns a sentence with the keys for ``name`` of another framework, or None for an unknown name.

    If a dotted name is unknown, looks up its parts from the last to the first.
    """
    if (meaning := equivalent_keys_of(name)) is None:
        return None
    if not meaning.keys:
        return f"{meaning.note}."
    note = f" ({meaning.note})" if meaning.note else ""
    return f"Here it is {' and '.join(meaning.keys)}{note}."
