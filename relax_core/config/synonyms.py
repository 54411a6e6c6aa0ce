"""Maps names of settings in TRL (`GRPOConfig`) and verl (`ppo_trainer.yaml`) to the equivalent keys of Relax.

There is one line for each meaning: Relax's keys, the difference if there is one, and the names elsewhere. A dotted name
is verl's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Meaning:
    """Holds the keys of Relax for one meaning.

    ``keys`` are Relax's, with a value if one value there corresponds to one value here. Without keys, ``note`` is a
    sentence that says what Relax has instead.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    note: str = ""


_POLICY = "actor_rollout_ref"

MEANINGS = (
    Meaning(("optimizer.lr",), ("learning_rate", f"{_POLICY}.actor.optim.lr")),
    Meaning(("optimizer.critic_lr",), ("critic.optim.lr",)),
    Meaning(("optimizer.tower_lr",), ("vision_lr", "vision_tower_lr")),
    Meaning(("model.freeze",), ("freeze_vision_tower", f"{_POLICY}.actor.freeze_vision_tower", "freeze_modules")),
    Meaning(("optimizer.schedule",), ("lr_scheduler_type", f"{_POLICY}.actor.optim.warmup_style", "lr_schedule")),
    Meaning(("optimizer.warmup_steps",), ("lr_warmup_steps", f"{_POLICY}.actor.optim.lr_warmup_steps")),
    Meaning(
        ("optimizer.warmup_steps",),
        ("warmup_ratio", f"{_POLICY}.actor.optim.lr_warmup_steps_ratio"),
        "in train steps, not as a share of them",
    ),
    Meaning(
        ("optimizer.beta2",),
        ("betas", "adam_betas", "optimizer.betas", f"{_POLICY}.actor.optim.betas"),
        "the optimizer is AdamW",
    ),
    Meaning((), ("optim", "optimizer_type", "optimizer.name", "optimizer.type"), "The optimizer of every run is AdamW"),
    Meaning(("optimizer.beta2",), ("adam_beta2",)),
    Meaning(("optimizer.eps",), ("adam_epsilon",)),
    Meaning(("optimizer.clip_grad",), ("max_grad_norm", "grad_clip", f"{_POLICY}.actor.grad_clip")),
    Meaning(
        ("rollout.prompts_per_step",),
        (
            "batch_size",
            "num_prompts_per_step",
            "train_batch_size",
            "data.train_batch_size",
            "rollout_batch_size",
            "generation_batch_size",
        ),
        "it counts prompts; each becomes algo.group_size samples",
    ),
    Meaning(
        ("parallel.micro_batch_tokens",),
        (
            *("per_device_train_batch_size", "micro_batch_size", "gradient_accumulation_steps"),
            *(f"{_POLICY}.actor.ppo_micro_batch_size_per_gpu", f"{_POLICY}.actor.ppo_max_token_len_per_gpu"),
        ),
        "micro-batches are packed by tokens; rollout.prompts_per_step is the batch of a train step",
    ),
    Meaning(
        ("algo.mini_batches",),
        ("mini_batch_size", "ppo_mini_batch_size", f"{_POLICY}.actor.ppo_mini_batch_size"),
        "the number of updates a train step, not the prompts in each",
    ),
    Meaning(("algo.epochs",), ("num_iterations", "ppo_epochs", f"{_POLICY}.actor.ppo_epochs")),
    Meaning(("algo.group_size",), ("num_generations", "n_samples_per_prompt", f"{_POLICY}.rollout.n", "rollout.n")),
    Meaning(
        ("rollout.max_new_tokens",),
        (
            *("max_completion_length", "max_tokens", "max_response_length", "data.max_response_length"),
            *("response_length", f"{_POLICY}.rollout.response_length"),
        ),
    ),
    Meaning(
        ("engine.context_length",),
        (
            *(
                "max_prompt_length",
                "data.max_prompt_length",
                "max_length",
                "cutoff_len",
                "max_total_sequence_length",
                "max_model_len",
                "vllm_max_model_length",
            ),
            *(f"{_POLICY}.rollout.prompt_length", f"{_POLICY}.rollout.max_model_len"),
        ),
        "tokens of prompt and response together",
    ),
    Meaning(("rollout.temperature",), (f"{_POLICY}.rollout.temperature",)),
    Meaning(("rollout.top_p",), (f"{_POLICY}.rollout.top_p",)),
    Meaning(("rollout.top_k",), (f"{_POLICY}.rollout.top_k",)),
    Meaning(
        ("run.steps",),
        ("max_steps", "max_num_steps", "total_training_steps", "trainer.total_training_steps", "num_steps"),
    ),
    Meaning(
        ("run.epochs",),
        ("num_train_epochs", "total_epochs", "num_epochs", "trainer.total_epochs"),
        "passes over the training rows, in place of run.steps",
    ),
    Meaning(
        ("run.dir",),
        ("output_dir", "save_dir", "trainer.default_local_dir", "trainer.rollout_data_dir"),
    ),
    Meaning(("run.save_every",), ("save_steps", "save_freq", "trainer.save_freq")),
    Meaning(("run.keep_last",), ("save_total_limit", "trainer.max_actor_ckpt_to_keep")),
    Meaning((), ("val_before_train",), "Every run evaluates before its first step, unless eval.every=0"),
    Meaning(("eval.every",), ("eval_steps", "test_freq", "trainer.test_freq")),
    Meaning(("resume",), ("resume_from_checkpoint", "trainer.resume_mode", "trainer.resume_from_path")),
    Meaning(("name",), ("run_name", "experiment_name", "trainer.experiment_name", "project_name")),
    Meaning(
        ("placement.gpus_per_node",),
        ("n_gpus", "num_gpus", "gpus", "n_gpus_per_node", "trainer.n_gpus_per_node"),
        "choose placement=gpu",
    ),
    Meaning(("mode=colocate",), ("colocate_all_models", "colocate")),
    Meaning(("engine.count",), ("vllm_num_engines", "num_engines", "rollout_num_engines")),
    Meaning(("algo",), ("stage", "train_type", "rl_algorithm"), "every run is reinforcement learning: relax list"),
    Meaning((), ("template", "chat_template"), "The chat template is that of the tokenizer in model.path"),
    Meaning((), ("data.split", "dataset_split"), "A split is a file: name it in data.path, or data.eval_path"),
    Meaning(
        (),
        ("max_samples", "max_train_samples", "train_max_samples"),
        "All rows of data.path are used, for run.steps or run.epochs; write fewer rows into the file",
    ),
    Meaning(
        (),
        ("num_workers", "dataloader_num_workers"),
        "Rows are read without workers; rollout.workers is the number of rollout processes",
    ),
    Meaning((), ("critic.model.path", "critic_pretrain"), "The critic of algo=ppo starts from model.path"),
    Meaning(
        (),
        ("repetition_penalty", "presence_penalty", "frequency_penalty"),
        "Sampling has no penalties: the trainer could not compute their log-probs",
    ),
    Meaning(("placement=gpu",), ("device", "device_map", "accelerator", "use_gpu", "cuda")),
    Meaning(("launcher.time_limit_min",), ("time", "walltime", "time_limit"), "minutes, with launcher=slurm"),
    Meaning(("plan=true",), ("dry_run", "dryrun"), "it shows what would run, and stops"),
    Meaning(("placement.nodes", "launcher.nodes"), ("nnodes", "num_nodes", "trainer.nnodes")),
    Meaning(
        ("parallel.tp",),
        (
            "tensor_parallel_size",
            "tensor_parallel",
            "tensor_model_parallel_size",
            f"{_POLICY}.actor.megatron.tensor_model_parallel_size",
        ),
    ),
    Meaning(
        ("parallel.pp",),
        (
            f"{_POLICY}.actor.megatron.pipeline_model_parallel_size",
            "pipeline_parallel_size",
            "pipeline_model_parallel_size",
        ),
    ),
    Meaning(("engine.tp",), ("vllm_tensor_parallel_size", f"{_POLICY}.rollout.tensor_model_parallel_size")),
    Meaning(
        ("engine.mem_fraction",),
        ("vllm_gpu_memory_utilization", "gpu_memory_utilization", f"{_POLICY}.rollout.gpu_memory_utilization"),
        "with engine=sglang",
    ),
    Meaning(("engine=embedded", "engine=sglang"), ("use_vllm", "vllm_mode", f"{_POLICY}.rollout.name")),
    Meaning(
        ("mode.max_staleness",),
        ("steps_per_generation", "staleness_threshold", "async_training.staleness_threshold"),
        "weight versions that a trained token may lag behind",
    ),
    Meaning(("algo=ppo", "algo=grpo"), ("algorithm.adv_estimator", "adv_estimator"), "all of them: relax list"),
    Meaning(("algo.aggregation",), ("loss_type", "loss_agg_mode", f"{_POLICY}.actor.loss_agg_mode")),
    Meaning(
        ("algo.clip_low", "algo.clip_high"),
        ("clip_ratio", "cliprange", "clip_range", "clip_eps", "epsilon", f"{_POLICY}.actor.clip_ratio"),
        "one for each side",
    ),
    Meaning(("algo.clip_low",), ("clip_ratio_low", "epsilon_low", f"{_POLICY}.actor.clip_ratio_low")),
    Meaning(("algo.clip_high",), ("clip_ratio_high", "epsilon_high", f"{_POLICY}.actor.clip_ratio_high")),
    Meaning(("algo.dual_clip",), ("clip_ratio_c", "delta", f"{_POLICY}.actor.clip_ratio_c")),
    Meaning(
        ("algo.kl_coef",),
        (
            *("beta", "reference_policy_kl_penalty", "kl_coeff", "kl_loss_coef", "use_kl_loss", "init_kl_coef"),
            *(f"{_POLICY}.actor.kl_loss_coef", f"{_POLICY}.actor.use_kl_loss", "algorithm.kl_ctrl.kl_coef"),
        ),
        "above 0 it starts the reference model",
    ),
    Meaning(("algo.kl_placement",), ("use_kl_in_reward", "algorithm.use_kl_in_reward")),
    Meaning(("algo.kl_estimator",), ("kl_loss_type", f"{_POLICY}.actor.kl_loss_type", "algorithm.kl_penalty")),
    Meaning(("algo.entropy_coef",), ("entropy_coeff", "ent_coef", f"{_POLICY}.actor.entropy_coeff")),
    Meaning(("algo.normalize_std",), ("scale_rewards", "algorithm.norm_adv_by_std_in_grpo")),
    Meaning(("algo.gamma",), ("algorithm.gamma",), "of algo=ppo"),
    Meaning(("algo.gae_lambda",), ("lam", "gae_lambda", "algorithm.lam"), "of algo=ppo"),
    Meaning(("algo.value_clip",), ("cliprange_value", "critic.cliprange_value"), "of algo=ppo"),
    Meaning(("parallel.recompute",), ("gradient_checkpointing", "enable_gradient_checkpointing")),
    Meaning(("model.dtype",), ("bf16", "fp16", "torch_dtype"), "float32 or bfloat16"),
    Meaning(
        ("model.path",),
        ("model_name_or_path", "model_name", "model_path", f"{_POLICY}.model.path", "pretrained"),
        "a Hugging Face folder, beside model=qwen3",
    ),
    Meaning(
        ("data.path",),
        ("dataset", "dataset_name", "train_files", "data.train_files", "prompt_data", "data_path"),
        "a file of rows, beside data=file",
    ),
    Meaning(("data.eval_path",), ("val_files", "data.val_files", "eval_dataset")),
    Meaning(("reward.name",), ("reward_funcs", "custom_reward_function.path", "reward_fn"), "a name, or a file's path"),
    Meaning(
        ("tracker.tensorboard",),
        ("report_to", "logger", "trainer.logger"),
        "others by tracker=wandb, mlflow or clearml",
    ),
    Meaning(
        ("tracker=wandb",),
        ("wandb", "wandb_project", "use_wandb", "tracker.project"),
        "with tracker.sinks.wandb.project=NAME",
    ),
    Meaning(("model", "optimizer", "algo", "rollout", "engine", "parallel"), (_POLICY,), "by what it is about"),
    Meaning(
        ("run", "eval", "placement", "tracker"),
        ("trainer",),
        "by what it is about; every run trains with Megatron, whose layout is parallel.*",
    ),
    Meaning(
        ("parallel.dp", "parallel.distributed_optimizer"),
        ("fsdp", "fsdp_config", "fsdp_size", "strategy", "deepspeed", "zero_stage", "ddp"),
        "every run trains with Megatron; parallel=dp2_sharded shards the optimizer",
    ),
    Meaning(
        (),
        (
            "lora",
            "lora_rank",
            "lora_alpha",
            "lora_r",
            "finetuning_type",
            "use_peft",
            "use_lora",
            "peft",
            "peft_config",
            "load_in_4bit",
        ),
        "Relax has no adapters and no quantized training: all weights train but for the parts of model.freeze",
    ),
    Meaning(("data.prompt_key",), ("prompt_field", "input_key", "prompt_column", "question_key")),
    Meaning(("data.answer_key",), ("label_key", "answer_field", "ground_truth_key", "solution_key")),
    Meaning(("rollout.stop",), ("stop_strings", "stop_words", "stop_sequences")),
    Meaning(("algo",), ("algorithm",), "relax algo=ppo --help lists what PPO has"),
    Meaning(("reward",), ("reward_model", "custom_reward_function")),
)
_BY_NAME = {name: meaning for meaning in MEANINGS for name in meaning.names}
# What users of other frameworks choose by these names.
OPTIONS_ELSEWHERE = {
    ("mode", "sync on_policy onpolicy synchronous hybrid"): "mode=colocate, or mode=async mode.max_staleness=0",
    ("mode", "disaggregated off_policy fully_async"): "mode=async",
    ("algo", "sft dpo kto rm reward_model pretrain"): "Relax trains by reinforcement learning alone. algo=distill "
    "learns from the log-probs of a teacher",
    ("algo", "reinforce reinforce++ reinforce_plus_plus"): "algo=reinforce_pp",
    ("modality", "vision image video audio omni multimodal"): "modality=auto, which reads what data.media_keys names",
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
# Words that are commands elsewhere, and what does the same here.
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


def meaning_of(name: str) -> Meaning | None:
    """Returns the meaning of a name, or of the last of its parts that has one."""
    parts = (name, *reversed(name.split(".")))
    found = next((_BY_NAME[one] for one in parts if one in _BY_NAME), None)
    return found or next((_BY_LETTERS[one] for one in map(_letters, parts) if one in _BY_LETTERS), None)


def synonym(name: str) -> str | None:
    """Returns one sentence with the keys that mean what ``name`` means elsewhere, or None for an unknown name.

    Of an unknown dotted name, its parts are looked up, the last first.
    """
    if (meaning := meaning_of(name)) is None:
        return None
    if not meaning.keys:
        return f"{meaning.note}."
    note = f" ({meaning.note})" if meaning.note else ""
    return f"Here it is {' and '.join(meaning.keys)}{note}."
