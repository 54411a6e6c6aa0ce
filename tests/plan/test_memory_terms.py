"""Compares the terms of the memory plan with values derived by hand."""

from __future__ import annotations

import pytest

from relax_core.config.compose import compose, load_config, typed_config
from relax_core.config.schema import RelaxConfig
from relax_core.plan.build_plan import Plan, make_plan
from relax_core.plan.context_length import settle_context
from relax_core.plan.memory_terms import GIB, MIB, MemoryHolder

FLOAT = 4


def holder(plan: Plan, name: str) -> MemoryHolder:
    return next(process for process in plan.memory if process.name == name)


def phase(plan: Plan, name: str, phase_name: str) -> dict[str, int]:
    return dict(next(part for part in holder(plan, name).phases if part.name == phase_name).terms)


def test_the_demos_trainer_by_hand() -> None:
    plan = make_plan(load_config())
    parameters = plan.model.parameters
    backward = phase(plan, "actor", "backward")
    assert backward["weights"] == parameters * FLOAT
    assert backward["gradients"] == parameters * FLOAT
    assert backward["Adam states"] == 2 * parameters * FLOAT
    # 8 groups of 17 prompt tokens ("rev 12345" and the template) and 16 x 7 response rows, all in one micro-batch
    rows = 8 * (17 + 16 * 7)
    a_row = 4 * 64 + 4 * 192 + 4 * 64 + 4 * 32 + 4 * 16 + 2 * 6
    assert backward["activations"] == rows * 2 * a_row * FLOAT
    assert backward["attention mask"] == rows * 129 * FLOAT
    assert backward["logits chunk"] == (1024 * plan.model.vocabulary + plan.model.vocabulary * 64) * FLOAT


def test_large_groups_need_no_mask_on_a_cpu() -> None:
    """Groups have 17 + 16 x 63 rows: 1025^2 pairs with a mask, 17^2 / 2 + 17 x 1008 + 16 x 63^2 / 2 pairs without a
    mask. With context parallelism, a rank's queries (half of the 4096 rows of a micro-batch) have a mask over their
    groups.
    """
    long = ["rollout.max_new_tokens=64", "rollout.prompts_per_step=4"]
    assert phase(make_plan(load_config(long)), "actor", "backward")["attention mask"] == 0
    on_two = make_plan(load_config([*long, "parallel.cp=2"]))
    assert phase(on_two, "actor", "backward")["attention mask"] == 4096 * 1025 // 2 * FLOAT


def test_a_bfloat16_model_has_a_float32_copy() -> None:
    plan = make_plan(load_config(["model.dtype=bfloat16", "parallel.dp=2", "parallel.distributed_optimizer=true"]))
    optimizer = phase(plan, "actor", "optimizer")
    parameters = plan.model.parameters
    assert holder(plan, "actor").count == 2
    assert optimizer["weights"] == 2 * parameters
    assert optimizer["gradients"] == 4 * parameters
    assert optimizer["Adam states"] == 12 * parameters // 2


def test_states_on_the_host_leave_the_gpu_by_hand() -> None:
    """The largest bucket is the embedding, 151,936 x 2,048 numbers of 12 bytes; 28 layers fit into smaller buckets."""
    on_host = make_plan(typed_config(compose(["experiment=qwen3_1_7b_24gb_1gpu"])))
    on_gpu = make_plan(typed_config(compose(["experiment=qwen3_1_7b_48gb_1gpu"])))
    parameters = on_host.model.parameters
    bucket = "Adam states of a bucket"
    phases, before = (
        {phase.name: phase.terms for phase in holder(plan, "every GPU").phases} for plan in (on_host, on_gpu)
    )
    for name in ("forward", "head", "backward", "optimizer"):
        assert (phases[name]["Adam states"], before[name]["Adam states"]) == (0, 12 * parameters)
    assert (phases["optimizer"][bucket], before["optimizer"][bucket]) == (12 * 151936 * 2048, 0)
    assert on_host.host_bytes == on_gpu.host_bytes == 14 * parameters, "mode=colocate moves the state in any case"
    (fault,) = make_plan(typed_config(compose(["experiment=qwen3_1_7b_24gb_1gpu", "optimizer.states=device"]))).refused
    assert fault.endswith("Set optimizer.states=host.")
    alone = ["experiment=qwen3_4b_async_8gpu", "algo.kl_coef=0", "optimizer.states=host"]
    sharded = make_plan(typed_config(compose(alone)))
    assert sharded.host_bytes == pytest.approx(12 * sharded.model.parameters, rel=1e-3), "tp and dp share the states"
    assert make_plan(typed_config(compose(alone[:2]))).host_bytes == 0
    of_reference = make_plan(typed_config(compose(alone[:1])))
    expected = 2 * of_reference.model.parameters * 2  # tp=2 and dp=2: two copies of 2 bytes a parameter on the node
    assert of_reference.host_bytes == pytest.approx(expected, rel=1e-3)
    assert make_plan(load_config()).host_bytes == 0


def test_a_rank_of_a_mixture_by_hand() -> None:
    """tp2_ep2: layers and embedding are split over tp, experts over ep, rows by sequence parallelism."""
    plan = make_plan(load_config(["model=tiny_qwen3_moe", "parallel=tp2_ep2"]))
    model = plan.model
    assert holder(plan, "actor").count == 2
    backward = phase(plan, "actor", "backward")
    split = model.layer_parameters - model.router_parameters + model.embedding_parameters + model.expert_parameters
    mine = split // 2 + model.router_parameters
    assert (backward["weights"], backward["Adam states"]) == (mine * FLOAT, 2 * mine * FLOAT)
    whole = phase(make_plan(load_config(["model=tiny_qwen3_moe"])), "actor", "backward")
    assert backward["activations"] == pytest.approx(whole["activations"] / 2, rel=1e-3)
    assert backward["logits chunk"] == whole["logits chunk"] // 2


def test_stages_rows_and_recomputation_by_hand() -> None:
    whole = phase(make_plan(load_config()), "actor", "backward")
    # One micro-batch: a stage has one of the two layers, and a context-parallel rank has half of the rows.
    for layout in ("pp2", "cp2"):
        rank = phase(make_plan(load_config([f"parallel={layout}"])), "actor", "backward")
        assert rank["activations"] == whole["activations"] // 2
    rows, inputs = 8 * (17 + 16 * 7), 64
    again = phase(make_plan(load_config(["parallel.recompute=full"])), "actor", "backward")
    assert again["activations"] == whole["activations"] // 2 + 2 * rows * inputs * FLOAT


def test_forward_roles_have_their_own_layout() -> None:
    plan = make_plan(load_config(["algo.kl_coef=0.1", "parallel.forward.tp=2", "parallel.forward.dp=2"]))
    assert (holder(plan, "actor").count, holder(plan, "reference").count) == (1, 4)
    whole = phase(plan, "actor", "forward")["weights"]
    assert phase(plan, "reference", "forward")["weights"] == whole // 2


def test_the_actor_keeps_the_references_weights_on_the_host() -> None:
    plan = make_plan(load_config(["algo.kl_coef=0.1", "parallel=tp2", "placement.forward=actor"]))
    terms = phase(plan, "actor", "backward")
    assert terms["reference's weights"] == terms["weights"]
    assert "reference" not in {process.name for process in plan.memory}
    without = make_plan(load_config(["algo.old_logprobs=actor_fwd", "placement.forward=actor"]))
    assert "reference's weights" not in phase(without, "actor", "backward")


def test_the_engines_cache_is_its_grown_rectangle() -> None:
    """256 samples (two steps) of 17 + 8 tokens. The cache starts with 64 columns."""
    plan = make_plan(load_config())
    assert plan.cache_tokens == 256 * 64
    values = 2 * 2 * 2 * 16  # keys and values, layers, heads, head size
    assert phase(plan, "engine", "rollout")["KV cache (16384 tokens)"] == 16384 * values * FLOAT
    small = make_plan(load_config(["engine.max_total_tokens=4000"]))
    assert small.cache_tokens == 4000


def test_every_role_is_counted() -> None:
    names = {process.name for process in make_plan(load_config(["algo=ppo"])).memory}
    assert {"actor", "critic", "engine"} <= names
    needy = make_plan(load_config(["algo.kl_coef=0.1", "algo.old_logprobs=actor_fwd", "engine.count=2"]))
    assert {"reference", "actor_fwd"} <= {process.name for process in needy.memory}
    assert holder(needy, "engine").count == 2
    taught = make_plan(load_config(["algo=distill"]))
    assert "teacher" in {process.name for process in taught.memory}
    by_engine = make_plan(load_config(["algo=distill", "algo.served_by=engine"]))
    assert "teacher engine" in {process.name for process in by_engine.memory}
    queue = make_plan(load_config(["bus=transfer_queue"]))
    assert any("TransferQueue" in process.name for process in queue.memory)


def test_a_gpu_of_the_published_mixture_by_hand() -> None:
    """Qwen3-30B-A3B, TP 4, PP 2, EP 4: experts over 8 GPUs, other weights over tp x pp, an embedding at each end."""
    config = load_planned("qwen3_30b_a3b_async_16gpu")
    plan = make_plan(config)
    experts = 48 * 128 * 3 * 2048 * 768 // 8
    routers = plan.model.router_parameters // 2
    dense = (plan.model.layer_parameters // 2 - routers + 151936 * 2048) // 4 + routers
    optimizer = phase(plan, "actor", "optimizer")
    assert optimizer["weights"] == 2 * (experts + dense)
    assert optimizer["gradients"] == 4 * (experts + dense)
    assert optimizer["Adam states"] == 12 * (experts + dense)
    rollout = phase(plan, "rollout", "rollout")
    assert rollout["engine weights"] == plan.model.parameters * 2 // 2
    assert rollout["KV cache (524288 tokens)"] == 524288 * 48 * 2 * 4 * 128 * 2 // 2


def test_a_gpu_holds_one_chunk_of_logits_and_no_float32_copy_of_the_output_weight() -> None:
    """Over tp 2: 1024 rows of 151,936 tokens in float32 and again in bfloat16, and the weight's gradient in float32.
    In addition the hidden states of all tokens, their gradients, and three copies of a chunk's hidden states.
    """
    plan = make_plan(load_planned("qwen3_4b_async_8gpu"))
    head, tokens = phase(plan, "actor", "head"), plan.work.micro_batch_tokens
    split = 1024 * 151936 * (4 + 2) + 151936 * 2560 * 4
    assert head["logits chunk"] == split // 2 + tokens * 2560 * (2 + 4) + 1024 * 2560 * (4 + 4 + 2)


def test_what_fits_beside_the_weights_does_fit() -> None:
    config = load_planned("qwen3_4b_async_8gpu")
    config.engine.max_total_tokens = make_plan(config).cache_tokens_fit or 0
    assert make_plan(config).refused == []
    config.engine.max_total_tokens = round(1.01 * config.engine.max_total_tokens)
    (fault,) = make_plan(config).refused
    assert "Set engine.max_total_tokens=" in fault


def load_planned(experiment: str) -> RelaxConfig:
    """Loads a layout that can be planned, but cannot run yet."""
    return typed_config(compose([f"experiment={experiment}"]))


def test_the_sum_is_of_all_processes() -> None:
    plan = make_plan(load_config())
    assert plan.total_bytes == sum(process.count * process.peak.bytes for process in plan.memory)
    assert 1.5 * GIB < plan.total_bytes < 5 * GIB
    assert holder(plan, "actor").peak.bytes > 400 * MIB


def test_the_prefix_cache_by_hand() -> None:
    """Four groups of the longest episodes. Two layers with two key-value heads of 16, keys and values, in float32."""
    game = ["env=number_guess", "data=seeds", "reward=env", "eval.every=0", "engine.context_length=192"]
    config = load_config(game, settle=settle_context)
    tokens = 4 * config.algo.group_size * 192
    assert config.engine.prefix_cache_tokens == tokens
    serving = phase(make_plan(config), "engine", "rollout")
    assert serving[f"prefix cache ({tokens} tokens)"] == tokens * 2 * 2 * 2 * 16 * FLOAT
    assert serving["copies of kept prefixes"] == 2 * 8192 * 2 * 2 * 2 * 16 * FLOAT, "more than 42 of 192 samples run"
    assert load_config(settle=settle_context).engine.prefix_cache_tokens == 0, "one turn"
    off = load_config([*game, "engine.prefix_cache_tokens=0"], settle=settle_context)
    assert not any(name.startswith("prefix cache") for name in phase(make_plan(off), "engine", "rollout"))
