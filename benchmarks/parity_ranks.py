"""The processes of `benchmarks.parity`: ranks, which compute all layouts in turn, and the single process."""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.one_rank import one_rank_parallel
from benchmarks.parity import BIASED, DENSE, EXPERTS, OTHERS
from benchmarks.parity_case import CONFIG, OPTIMIZER, SPEC, STEPS, TEMPERATURE, Outcome
from benchmarks.parity_data import (
    BANNED,
    make_groups,
    make_model,
    micro_batches,
    one_sample_each,
    read_groups,
    routed,
    save_rollout,
    with_kept,
    with_rollout,
)
from benchmarks.parity_huggingface import huggingface_steps
from relax_core.config.schema import OptimizerConfig
from relax_core.contracts.media import MediaReader
from relax_core.contracts.train import StepMetrics
from relax_core.contracts.tree import TokenTree
from relax_core.train import parallel_layout, process_group
from relax_core.train.megatron_rank import RankSetup
from relax_core.train.micro_batches import split_over_ranks
from relax_core.train.policy_backend import MegatronBackend
from tests.trees import of_tokens

DEADLINE_S = 300.0
Order = Callable[[int, Sequence[TokenTree]], Sequence[TokenTree]]  # (step, groups) → groups in the order of this step
BALANCE = 0.1  # coefficient of the balancing loss
ONE_RANK = one_rank_parallel(micro_batch_tokens=96)
CHUNK_ROWS = 8  # small, because each micro-batch should have several chunks of logits


def make_backend(
    folder: Path,
    *,
    family: str,
    layout: Mapping[str, Any],
    rank: int,
    ranks: int,
    port: int,
    trainable: bool = True,
    packing: str = "tree",
    media: MediaReader | None = None,
    optimizer: OptimizerConfig = OPTIMIZER,
    frozen: Sequence[str] = (),
) -> MegatronBackend:
    parallel_layout.LOGPROB_CHUNK_ROWS = CHUNK_ROWS
    setup = RankSetup(
        model_folder=folder / family,
        family=family,
        parallel=dataclasses.replace(ONE_RANK, **layout),
        optimizer=optimizer,
        total_steps=STEPS,
        dtype="float32",
        algorithm=SPEC,
        config=CONFIG,
        rank=rank,
        world_size=ranks,
        store_address=f"127.0.0.1:{port}",
        timeout_s=DEADLINE_S,
        seed=0,
        moe_aux_loss_coef=BALANCE if packing == "balanced" else 0.0,
        banned_token_ids=[BANNED] if packing == "kept" else [],
        frozen=frozen,
    )
    return MegatronBackend(setup, temperature=TEMPERATURE, trainable=trainable, media=media)


def run_steps(
    backend: MegatronBackend,
    groups: Sequence[TokenTree],
    *,
    replica: int = 0,
    layout: Mapping[str, Any],
    order: Order = lambda step, groups: groups,
    steps: int = STEPS,
    after_step: Callable[[], None] = lambda: None,
) -> Outcome:
    """Trains some steps on one replica. ``order`` orders the groups of a step. Only rank 0 returns complete weights."""
    replicas = layout.get("dp", 1)

    def logprobs() -> np.ndarray:
        """Returns the log-probs of all tokens, float32 ``[tokens]``."""
        found = backend.logprobs(groups)
        return np.concatenate([of_tokens(group, own) for group, own in zip(groups, found, strict=True)])

    before = logprobs()
    if not backend.trainable:
        return Outcome(losses=[], grad_norms=[], logprobs=[before], weights={})
    metrics: list[StepMetrics] = []
    for step in range(steps):
        backend.begin_step(step)
        for batch in micro_batches(order(step, groups), pipeline="pp" in layout):
            backend.accumulate(split_over_ranks(batch, replicas)[replica])
        metrics.append(backend.finish_step())
        after_step()
    return Outcome(
        losses=[metric.loss for metric in metrics],
        grad_norms=[metric.grad_norm for metric in metrics],
        logprobs=[before, logprobs()],
        weights={name: tensor.cpu().clone() for name, tensor in backend.export()},
        loads=[figure for metric in metrics for figure in metric.moe.values()],
    )


def rank_main(folder: Path, *, rank: int, ranks: int, port: int, rows: Sequence[Any]) -> None:
    """Computes all rows of the table with ``ranks`` ranks. Rank 0 writes a line to ``<ranks>.jsonl`` for each row."""
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    try:
        for row in rows:
            for packing in row.packings:
                reference = Outcome.read(folder / f"{row.family}.{packing}.safetensors")
                groups = read_groups(folder, row.family, packing)
                backend = make_backend(
                    folder,
                    family=row.family,
                    layout=row.layout,
                    rank=rank,
                    ranks=ranks,
                    port=port,
                    trainable=row.trainable,
                    packing=packing,
                )
                replica = parallel_state.get_data_parallel_rank()
                outcome = run_steps(backend, groups, replica=replica, layout=row.layout)
                if row.trainable:
                    np.testing.assert_allclose(outcome.loads, reference.loads, atol=1e-5, err_msg="experts' loads")
                if rank == 0:
                    line = {"name": row.name, "packing": packing, **outcome.difference(reference)}
                    with (folder / f"{ranks}.jsonl").open("a") as file:
                        file.write(json.dumps(line) + "\n")
            process_group.leave()
    except BaseException:
        (folder / f"{ranks}.{rank}.error").write_text(f"{row.name}, {packing}: {traceback.format_exc()}")
        raise


def reference_main(folder: Path) -> None:
    """Computes the steps of the single process in every packing, and the steps of Hugging Face on one padded batch."""
    torch.set_num_threads(1)
    lines = []
    for family in (DENSE, EXPERTS, BIASED, *OTHERS):
        model = make_model(folder / family, family)
        backend = make_backend(folder, family=family, layout={}, rank=0, ranks=1, port=0)
        groups = with_rollout(make_groups(), backend.logprobs(make_groups()))
        hugging_face = huggingface_steps(model, groups)
        banning = make_backend(folder, family=family, layout={}, rank=0, ranks=1, port=0, packing="kept")
        kept = with_rollout(with_kept(make_groups()), banning.logprobs(with_kept(make_groups())))
        truncated = huggingface_steps(make_model(folder / family, family), kept, banned=[BANNED])
        packings = {"tree": groups, "plain": one_sample_each(groups), "kept": kept}
        if family == "qwen3_moe":
            replayed = routed(make_groups())
            packings |= {"replay": with_rollout(replayed, backend.logprobs(replayed)), "balanced": groups}
        for packing, packed in packings.items():
            backend = make_backend(folder, family=family, layout={}, rank=0, ranks=1, port=0, packing=packing)
            outcome = run_steps(backend, packed, layout={})
            outcome.save(folder / f"{family}.{packing}.safetensors")
            save_rollout(folder, family, packing, packed)
            if packing in ("tree", "plain", "kept"):
                figures = (truncated if packing == "kept" else hugging_face).difference(outcome)
                lines.append({"name": f"Hugging Face, {family}", "packing": packing, **figures})
    (folder / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
