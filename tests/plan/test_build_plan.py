"""Tests the plan of a run: agreement with the services, the batch and the placement, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from relax_core.config.compose import compose, load_config, typed_config
from relax_core.config.errors import ConfigError, NotYet
from relax_core.config.schema import RelaxConfig
from relax_core.config.validate import problems_of
from relax_core.plan.build_plan import as_json_values, as_text, make_plan
from relax_core.plan.memory_terms import GIB
from relax_core.plan.placement import gpu_problems
from relax_core.plan.plan_command import plan_run, save_plan
from relax_core.preflight import CHECKS, settle
from relax_core.roles.process_placement import roles_of
from relax_core.tools.make_tiny import tiny_model_folder
from tests.config.conftest import SHAPE, write_folder

PRESETS = {
    "qwen3_0_6b_24gb_1gpu": 1,
    "qwen3_1_7b_24gb_1gpu": 1,
    "qwen3_1_7b_48gb_1gpu": 1,
    "qwen3_4b_48gb_1gpu": 1,
    "qwen3_4b_80gb_1gpu": 1,
    "qwen3_vl_4b_80gb_1gpu": 1,
    "qwen3_4b_sft_80gb_1gpu": 1,
    "qwen3_4b_dpo_80gb_1gpu": 1,
    "qwen3_4b_lora_24gb_1gpu": 1,
    "qwen3_4b_lora_80gb_1gpu": 1,
    "qwen3_vl_4b_lora_24gb_1gpu": 1,
    "qwen3_vl_4b_lora_80gb_1gpu": 1,
    "qwen3_4b_colocate_8gpu": 8,
    "qwen3_4b_async_8gpu": 8,
    "qwen3_30b_a3b_async_16gpu": 16,
    "qwen3_vl_30b_a3b_async_16gpu": 16,
    "qwen3_5_9b_async_8gpu": 8,
    "qwen3_5_35b_a3b_async_16gpu": 16,
    "qwen3_omni_30b_a3b_async_16gpu": 16,
    "qwen3_omni_30b_a3b_colocate_16gpu": 16,
    "qwen3_omni_30b_a3b_video_16gpu": 16,
}


def planned(*overrides: str) -> RelaxConfig:
    return typed_config(compose(overrides))


@pytest.mark.parametrize("algo", ["grpo", "ppo", "distill"])
def test_the_plan_has_the_roles_that_are_started(algo: str) -> None:
    config = load_config([f"algo={algo}", "engine.count=2"])
    assert make_plan(config).roles == roles_of(config)


@pytest.mark.parametrize(("name", "gpus"), PRESETS.items())
def test_the_presets_plan_clean_and_cannot_start_yet(name: str, gpus: int) -> None:
    config = planned(f"experiment={name}")
    problems = problems_of(config, CHECKS)
    assert problems and all(isinstance(problem, NotYet) for problem in problems), problems
    plan = make_plan(config, problems)
    assert plan.refused == []
    used = {(place.node, gpu) for place in plan.places for gpu in place.gpus}
    assert len(used) == gpus == config.placement.nodes * config.placement.gpus_per_node
    assert as_text(plan).startswith(f"{name}: plans, but cannot start yet:\n  - ")
    message = " ".join(problems)
    assert "What exists" not in message, "a preset names an option that does not exist"
    assert ("mode=colocate" in message) == (name == "qwen3_omni_30b_a3b_colocate_16gpu"), "it has two machines"
    assert set(gpu_problems(config)) <= set(problems)
    with pytest.raises(ConfigError):
        load_config([f"experiment={name}"], checks=CHECKS)


def test_the_plan_has_every_rollout_worker_and_tells_what_several_cost() -> None:
    several = ("mode.max_staleness=0", "rollout.workers=3", "rollout.reward_workers=2", "reward=math")
    plan = make_plan(planned(*several, "data=arithmetic"))
    counts = {holder.name: holder.count for holder in plan.memory}
    assert (plan.roles["rollout"], counts["rollout"], counts["reward worker"]) == (3, 3, 6)
    (told,) = plan.warnings
    assert told.startswith("mode.max_staleness=0 with rollout.workers=3: ")
    assert told in " ".join(as_text(plan).split())
    assert make_plan(planned("rollout.workers=3")).warnings == make_plan(planned(*several[:1])).warnings == []


def test_an_asynchronous_layout_gives_each_gpu_to_one_role() -> None:
    plan = make_plan(planned("experiment=qwen3_30b_a3b_async_16gpu"))
    taken = [(place.node, gpu) for place in plan.places for gpu in place.gpus]
    assert len(taken) == len(set(taken)) == 16
    by_name = {place.name: place for place in plan.places}
    assert by_name["actor-5"].coordinates == "pp1 tp1 ep1"
    assert (by_name["engine-1"].node, by_name["engine-1"].gpus) == (1, (2, 3))
    assert not any("actor_fwd" in name for name in by_name)


def test_forward_roles_with_gpus_follow_the_engines() -> None:
    plan = make_plan(planned("experiment=qwen3_omni_30b_a3b_video_16gpu"))
    by_name = {place.name: place for place in plan.places}
    assert (by_name["actor_fwd-1"].node, by_name["actor_fwd-1"].gpus) == (1, (7,))


def test_ranks_on_cores_are_told_by_their_place_in_the_layout() -> None:
    overrides = [
        "parallel=tp2_pp2",
        "algo.old_logprobs=actor_fwd",
        "parallel.forward.pp=2",
    ]
    plan = make_plan(load_config(overrides))
    places = {place.name: place.coordinates for place in plan.places}
    assert (places["actor-0"], places["actor-3"], places["actor_fwd-1"]) == ("pp0 tp0", "pp1 tp1", "pp1")
    assert places["engine-0"] == ""
    text = as_text(plan)
    assert "ranks actor-0 (pp0 tp0), actor-1 (pp0 tp1), actor-2 (pp1 tp0)" in text
    unread = as_text(make_plan(load_config(["parallel.forward.tp=2"])))
    assert "parallel.forward: with these settings the algorithm starts neither actor_fwd nor the reference." in unread
    by_actor = ["parallel.forward.tp=2", "algo.kl_coef=0.1", "placement.forward=actor"]
    (line,) = [line for line in make_plan(load_config(by_actor)).unread if "parallel.forward" in line]
    assert "placement.forward=actor" in line


def test_the_batch_in_words() -> None:
    plan = make_plan(load_config(["algo.mini_batches=2", "algo.epochs=3", "mode.max_staleness=2"]))
    message = " ".join([*plan.batch, *plan.credits])
    assert "8 prompts x 16 samples = 8 groups, 128 samples a train step" in message
    assert "8 groups / 2 mini-batches = 4 groups an update; x 3 epochs = 6 updates" in message
    assert "17 prompt tokens once + 16 x 7 = 129 token rows" in message
    assert "(max_staleness 2 + 1) x 8 groups = at most 24 groups, 384 samples" in message


def test_ranks_without_work_are_told() -> None:
    overrides = ["parallel.dp=8", "rollout.prompts_per_step=8", "algo.group_size=2", "algo.mini_batches=4"]
    message = " ".join(make_plan(load_config(overrides)).batch)
    assert "Only 4 of 8 data-parallel ranks have work in a micro-batch: an update has no more episodes." in message


def test_a_group_that_is_larger_than_a_micro_batch_is_cut_by_episodes() -> None:
    """Groups have 17 + 16 x 7 rows. With 64 rows a piece has the prompt and 6 answers: three pieces per group, so two
    more prompts. With 20 rows a piece has room for less than one answer, so each answer is a separate piece.
    """
    work = make_plan(load_config(["parallel.micro_batch_tokens=64"])).work
    assert (work.groups_together, work.group_pieces, work.micro_batches, work.micro_batch_rows) == (0, 3, 24, 64)
    assert work.repeated_share == pytest.approx(2 * 17 / (129 + 2 * 17))
    plan = make_plan(load_config(["parallel.micro_batch_tokens=20"]))
    assert (plan.work.group_pieces, plan.work.micro_batches, plan.work.micro_batch_rows) == (16, 128, 17 + 7)
    message = " ".join(plan.batch)
    assert "cut into 16 pieces, each with the prompt: at most 66.4% of the rows are repeated prompts." in message
    assert "One episode alone, 17 prompt and 7 response rows, is more than parallel.micro_batch_tokens=20" in message


def test_episodes_of_one_group_go_to_several_ranks() -> None:
    """Two groups on 4 ranks: 8 answers per rank, so at most three cuts. On 2 ranks, one group per rank."""
    for ranks, repeated in ((4, 3), (2, 0)):
        plan = make_plan(load_config([f"parallel.dp={ranks}", "algo.mini_batches=4"]))
        assert plan.work.busy_ranks == ranks and plan.work.micro_batches == 4
        assert plan.work.repeated_share == pytest.approx(repeated * 17 / (2 * 129 + repeated * 17))
        assert ("Episodes of one group go to several ranks" in " ".join(plan.batch)) == bool(repeated)


def test_sixteen_answers_of_8192_tokens_fit_the_published_split() -> None:
    """The peak is one answer with its prompt, 2048 + 8191 rows: 36 layers of 69,780 bytes a row on each of two
    tensor-parallel ranks, with the sequence also split (4 x 2560 + 4 x 4096 + 3 x 1024 + 4 x 9728 numbers of 2 bytes,
    and 2 + 32 + 32 + 8 float32 numbers, halved; cosines and sines of 4 x 128 numbers), and a buffer of gathered rows.
    There is no mask of 10,239 rows squared.
    """
    long = ["algo.group_size=16", "rollout.max_new_tokens=8192", "engine.context_length=10240"]
    plan = make_plan(planned("experiment=qwen3_4b_async_8gpu", *long))
    assert plan.refused == []
    assert (plan.work.episode_rows, plan.work.micro_batch_rows) == (10239, 10239)
    (actor,) = (holder for holder in plan.memory if holder.name == "actor")
    assert actor.peak.terms["activations"] == 10239 * 36 * 69780 + 10239 * 2560 * 2
    assert actor.peak.terms["attention mask"] == 80 * 80 * 16
    assert actor.peak.bytes < 79.6 * GIB


@pytest.mark.parametrize(
    ("memory", "overrides", "fix"),
    [
        (60, [], "Set parallel.recompute=full."),
        (60, ["parallel.micro_batch_tokens=30000"], "Set parallel.recompute=full."),
        (75, ["parallel.micro_batch_tokens=30000"], "Set parallel.micro_batch_tokens="),
        (38, [], "Set parallel.recompute=full optimizer.states=host."),
        (16, ["rollout.max_new_tokens=30000", "engine.context_length=32768"], "of its 32767 rows only "),
        (14, [], "leave no room for a row: raise parallel.tp"),
    ],
)
def test_the_setting_that_makes_a_trainer_fit_makes_it_fit(memory: int, overrides: list[str], fix: str) -> None:
    long = ["algo.group_size=16", "rollout.max_new_tokens=8192", "engine.context_length=10240"]
    cache = "engine.max_total_tokens=131072"
    two_ranks = ["placement.roles.actor=2", "parallel.dp=1", "parallel.distributed_optimizer=false"]
    memory_key = f"placement.gpu_memory_gib={memory}"
    line = ["experiment=qwen3_4b_async_8gpu", *two_ranks, *long, cache, memory_key, *overrides]
    (fault,) = (fault for fault in make_plan(planned(*line)).refused if fault.startswith("actor: "))
    assert fix in fault
    named = re.search(r"Set (.*)\.$", fault)
    if named is not None:
        again = make_plan(planned(*line, *named[1].split()))
        assert not any(fault.startswith("actor: ") for fault in again.refused), again.refused


def test_a_sync_and_a_checkpoint_in_bytes() -> None:
    plan = make_plan(load_config(["algo=ppo", "engine.count=3"]))
    assert plan.transfers.sync_bytes == 4 * plan.model.parameters
    assert plan.transfers.receivers == 3
    assert plan.transfers.checkpoint_bytes == 2 * 12 * plan.model.parameters


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["placement.gpus_per_node=4"], "placement.roles ask for 8 GPUs, placement.nodes=1 x gpus_per_node=4 = 4."),
        (["~placement.roles.rollout"], "placement.roles.rollout is not set"),
        (["+placement.roles.critic=1", "placement.nodes=2"], "has no such role"),
        (
            ["placement.forward=separate", "+placement.roles.reference=1", "parallel.forward.tp=2"],
            "dp=1 = 2 ranks, but there are GPUs for 1. Set placement.roles.reference=2.",
        ),
        (["engine.count=3"], "engine.count=3 x engine.tp=1 = 3 GPUs, but rollout has 4. Set engine.count=4."),
        (["engine.tp=3", "engine.count=1", "placement.roles.rollout=3"], "would have GPUs of two machines"),
        (["placement.gpu_memory_gib=24"], "actor: head needs"),
        (["placement.gpu=null"], "the memory of a GPU is unknown"),
        (["engine.context_length=50000"], "more than the 40960 positions of model.shape=Qwen3-4B"),
        (["mode=colocate"], "Set parallel.dp=4 or placement.gpus_per_node=4."),
        (["mode=colocate"], "with mode=colocate, where all roles share all GPUs. Drop it."),
    ],
)
def test_what_cannot_work_names_key_value_and_fix(overrides: list[str], text: str) -> None:
    plan = make_plan(planned("experiment=qwen3_4b_async_8gpu", *overrides))
    assert any(text in fault for fault in plan.refused), plan.refused


def test_gpus_of_roles_without_gpus_are_refused() -> None:
    (fault,) = make_plan(planned("+placement.roles={actor: 2}")).refused
    assert "Choose placement=gpu" in fault


def test_states_count_in_the_cache_that_a_group_needs() -> None:
    """A state of tiny_qwen3_5 takes 13,248 bytes: 3 layers of 4 x 12 x 16 + 3 x 112 numbers. A token takes 256."""
    given = ("model=tiny_qwen3_5", "data=see", "algo.group_size=8", "rollout.max_new_tokens=8")
    (fault,) = make_plan(planned(*given, "engine.max_total_tokens=479")).refused
    assert fault.startswith("engine.max_total_tokens=479 cannot hold one group: algo.group_size=8 x (rollout.max_new")
    assert "8 + 52 for the states of a sample's linear attention) = 480. Raise it." in fault
    plan = make_plan(planned(*given, "engine.max_total_tokens=2000", "rollout.prompts_per_step=8"))
    assert plan.refused == [] and plan.work.samples_in_flight == 2000 // (plan.work.sample_tokens + 52)


def test_a_model_without_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.shape=<one of: Llama-3.1-8B, Mistral-7B-v0.3, Qwen2.5-7B, Qwen3"):
        make_plan(planned("model=qwen3"))


def test_rays_store_is_memory_too() -> None:
    with pytest.raises(ConfigError, match=r"too little memory"):
        plan_run(planned("launcher.object_store_mb=99999999"))


def test_too_little_memory_is_refused_with_the_largest_sums() -> None:
    with pytest.raises(ConfigError, match=r"too little memory: the run needs about .* GiB \(1 x engine"):
        plan_run(planned("engine.max_running_samples=1000000000"))


def test_unread_config_are_told() -> None:
    message = " ".join(make_plan(load_config(["eval.every=0", "optimizer.schedule=constant"])).unread)
    for key in ("eval.rows", "optimizer.min_lr_ratio", "rollout.reward_workers", "algo.kl_estimator"):
        assert key in message
    assert "algo.kl_estimator" not in " ".join(make_plan(load_config(["algo.kl_coef=0.1"])).unread)


def test_what_of_the_rollout_is_unread_depends_on_what_lives_through_a_weight_change() -> None:
    strict = ["mode.max_staleness=0", "mode.on_stale=mask", "rollout.partial=abort", "rollout.surplus=keep"]
    message = " ".join(make_plan(load_config(strict)).unread)
    for key in ("mode.on_stale", "rollout.partial", "rollout.surplus"):
        assert key in message
    message = " ".join(make_plan(load_config([*strict, "rollout.over_sampling=1.5"])).unread)
    for key in ("mode.on_stale", "rollout.partial", "rollout.surplus"):
        assert key not in message


def test_the_credits_count_the_spare_groups() -> None:
    for surplus, groups in (("drop", 24), ("keep", 20)):
        plan = make_plan(load_config(["rollout.over_sampling=1.5", f"rollout.surplus={surplus}"]))
        assert f"at most {groups} groups" in " ".join(plan.credits), plan.credits


def test_the_plan_in_the_runs_folder(tmp_path: Path) -> None:
    plan = make_plan(load_config())
    save_plan(plan, tmp_path)
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values == json.loads(json.dumps(as_json_values(plan)))
    assert values["can_start"] and values["total_bytes"] == plan.total_bytes
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_what_kept_sets_cost_is_told_where_tokens_are_left_out() -> None:
    assert "kept sets" not in as_text(make_plan(planned()))
    tokens = 8 * 16 * 8  # prompts, samples per prompt, tokens per sample
    real = ["model=qwen3", "+model.shape=Qwen3-4B", "rollout.max_new_tokens=8"]
    for overrides, vocabulary, most in (
        (["rollout.top_p=0.9"], 56, 4 + 4 * 2),  # a bitmask of 56 tokens
        (["rollout.top_k=2", "rollout.min_p=0.1"], 56, 4 + 4 * 2),
        (["rollout.top_k=20", *real], 151_936, 4 + 4 * 20),
        (["rollout.min_p=0.1", *real], 151_936, 4 + 151_936 // 8),
    ):
        plan = make_plan(planned(*overrides))
        assert plan.model.vocabulary == vocabulary
        assert (plan.transfers.kept_set_bytes, plan.transfers.kept_step_bytes) == (most, most * tokens)
        assert f"kept sets: {most} bytes a sampled token and " in as_text(plan)


def test_episodes_of_several_turns_are_counted_with_what_they_observe() -> None:
    """A game has two observations of ten tokens between three responses, or as many as fit into the context."""
    plan = make_plan(load_config(["experiment=number_guess", "env.max_observation_tokens=10"], settle=settle))
    work, size = plan.work, plan.work.group_size
    assert work.observed_tokens == 2 * 10
    assert work.group_rows == work.prompt_tokens + size * (work.new_tokens + 20 - 1)
    full = make_plan(load_config(["experiment=number_guess"])).work
    assert full.prompt_tokens + full.new_tokens + full.observed_tokens == full.sample_tokens == 128  # the context
    message = " ".join(as_text(plan).split())
    assert "Episodes An episode has at most 3 turns" in message and "20 observed tokens" in message
    assert f"keeps keys and values of {4:g} groups of the longest episodes" in message
    assert make_plan(load_config([])).episodes == [] and make_plan(load_config([])).work.observed_tokens == 0


def test_environment_workers_are_counted_with_their_memory_and_cores() -> None:
    pytest.importorskip("gymnasium")
    game = ["env=gymnasium", "data=seeds", "reward=env", "model.task=number_guess", "eval.every=0"]
    words = [*game, "engine.context_length=128", "rollout.workers=2"]
    few, many = (make_plan(load_config([*words, f"env.workers={count}"])) for count in (1, 3))
    (workers,) = (holder for holder in many.memory if holder.name == "environment worker")
    assert (workers.count, workers.peak.bytes) == (2 * 3, 2 * GIB)
    assert many.total_bytes - few.total_bytes == (2 * 3 - 2) * 2 * GIB
    assert "6 processes for the environment (2 x env.workers=3)" in " ".join(many.episodes)


def test_agents_are_counted_with_their_processes() -> None:
    words = ["experiment=calculator", "env=agent", "agent.command=sleep 1", "rollout.workers=2"]
    cold, warm = (make_plan(load_config([*words, f"agent.workers={count}"])) for count in (0, 3))
    (agents,) = (holder for holder in warm.memory if holder.name == "agent with its guard")
    assert agents.count == 2 * 3
    assert "6 processes take task after task: sleep 1" in " ".join(warm.episodes)
    assert "each in a separate process: sleep 1" in " ".join(cold.episodes)
    elsewhere = make_plan(load_config(["experiment=calculator", "env=agent"]))
    assert "ask for up to 256 tasks at one time at 127.0.0.1, port any free one" in " ".join(elsewhere.episodes)
    assert not [holder for holder in elsewhere.memory if holder.name == "agent with its guard"]


def test_a_template_that_never_writes_a_stop_token_is_warned_of_with_the_fix(tmp_path: Path) -> None:
    model_folder = write_folder(tmp_path / "model", SHAPE | {"model_type": "qwen3"})
    data_file = tmp_path / "rows.jsonl"
    data_file.write_text('{"prompt": "1", "answer": "1"}\n')
    line = [
        "model=qwen3",
        f"model.path={model_folder}",
        "data=file",
        f"data.path={data_file}",
        "eval.every=0",
        "data.eval_size=0",
    ]

    def warnings(*words: str) -> list[str]:
        config = load_config([*line, *words], checks=CHECKS, settle=settle)
        return [line for line in make_plan(config).warnings if "stop token" in line]

    assert warnings() == []
    settings = json.loads((model_folder / "tokenizer_config.json").read_text())
    (model_folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<pad>"}))
    (warning,) = warnings()
    assert f"model.path={model_folder}" in warning and "(<pad>)" in warning and "which adds <|im_end|>" in warning
    assert warnings('rollout.stop=["<|im_end|>"]') == []
    (fix,) = re.findall(r'Write ("eos_token_id": .*) into generation_config.json', warning)
    (model_folder / "generation_config.json").write_text("{" + fix + "}")
    assert warnings() == []


@pytest.mark.parametrize(
    ("algo", "answer"), [("dpo", {"chosen": "123", "rejected": "456"}), ("kto", {"completion": "123", "label": True})]
)
def test_a_pair_larger_than_a_micro_batch_is_refused(algo: str, answer: dict[str, object], tmp_path: Path) -> None:
    """A labelled row and its partner are a pair, too."""
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"rev {place}", **answer} for place in range(8)]
    if algo == "kto":
        rows = [row | {"completion": str(place)} for place, row in enumerate(rows)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = [f"algo={algo}", "data=file", f"data.path={file}", "data.eval_size=0"]
    words += ["model=folder", f"model.path={tiny_model_folder('tiny_qwen3', task='reverse_digits')}"]
    words += ["eval.every=0", "rollout.prompts_per_step=4"]
    load_config(words, checks=CHECKS, settle=settle)
    with pytest.raises(ConfigError, match=r"parallel\.micro_batch_tokens=8: .* Use \d+ or more"):
        load_config([*words, "parallel.micro_batch_tokens=8"], checks=CHECKS, settle=settle)
