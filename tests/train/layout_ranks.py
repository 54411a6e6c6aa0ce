"""Runs two ranks through several layouts, and a single process. Each process writes JSON for test_layout_ranks.py.

`python layout_ranks.py <folder>` writes a model, single.json, rank0.json and rank1.json there.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import VOCABULARY, make_model
from tiny_trainer import CONFIG, PPO_CLIP, clip_loss, dp_groups, make_backend, parallel_config, train_step

from algorithms import dpo
from relax_core.contracts.algorithm import LossInputs, LossOutputs
from relax_core.contracts.kept_tokens import OUTSIDE, KeptTokens
from relax_core.contracts.tree import OF_DATA, TokenTree
from relax_core.train import process_group
from relax_core.train.micro_batches import split_over_ranks
from relax_core.train.policy_backend import MegatronBackend
from tests.train.rank_server import run_alone_and_on_two_ranks
from tests.trees import answer_ids, answers_tree, random_tree, with_tokens

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "cp2": {"cp": 2},
    "pp2": {"pp": 2},
    "dp2 overlap": {"dp": 2, "distributed_optimizer": True, "overlap": True},
}
TOP_K = 3


def loss_of_batch(inputs: LossInputs, config: Any) -> LossOutputs:
    """Computes DPO's loss with a reference, a loss on the teacher's tokens with a teacher, otherwise PPO's clip."""
    if inputs.reference_logprobs is not None:
        return dpo.loss(inputs, dpo.DpoConfig(beta=2.0, sft_coef=0.5))
    if inputs.top_logprobs is None:
        return clip_loss(inputs, CONFIG)
    inside = inputs.top_logprobs > OUTSIDE
    return LossOutputs(loss_sum=((inputs.top_logprobs * inside).mean(1) * inputs.loss_mask).sum())


def with_teacher(group: TokenTree) -> TokenTree:
    """Adds teacher columns and kept sets. Some have fewer tokens than top_k; -1 marks missing tokens."""
    own_ids = answer_ids(group)
    tokens = len(own_ids)
    random = np.random.default_rng(tokens)
    mask = random.random((tokens, 50)) < random.choice([0.0, 0.04, 0.5], (tokens, 1))
    mask[np.arange(tokens), own_ids] = True
    ids = random.integers(-1, 50, (tokens, TOP_K), dtype=np.int32)
    top = np.zeros((tokens, TOP_K), dtype=np.float32)
    teacher = {"teacher_logprobs": top[:, 0].copy(), "teacher_top_ids": ids, "teacher_top_logprobs": top}
    return with_tokens(group, **teacher, kept=KeptTokens.of_mask(mask))


def tree_batches() -> list[list[TokenTree]]:
    """Makes forests of several turns. Their episodes share sampled rows and have several segments."""
    random = np.random.default_rng(11)
    trees = [random_tree(random, uid=f"g{place}", roots=2, turns=2, vocabulary=VOCABULARY) for place in range(3)]
    return [trees[:2], trees[2:]]


def pair_batches() -> list[list[TokenTree]]:
    """Makes pairs of responses from data rows, with log-probs of a reference."""
    random = np.random.default_rng(12)

    def pair(place: int, *lengths: int) -> TokenTree:
        prompt, answers = random.integers(0, VOCABULARY, 5), random.integers(0, VOCABULARY, sum(lengths))
        reference = -3 * random.random(len(answers), dtype=np.float32)
        extras = {"reference_logprobs": reference, "advantages": np.ones(len(answers), dtype=np.float32)}
        return answers_tree(f"g{place}", prompt, lengths, answers, engine=OF_DATA, **extras)

    return [[pair(0, 7, 2), pair(1, 3, 3), pair(2, 1, 6)], [pair(3, 4, 9)]]


def refused(work: Callable[[], Any]) -> str:
    try:
        work()
    except (ValueError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def what_it_sees(backend: MegatronBackend, *, replica: int = 0, replicas: int = 1) -> dict[str, Any]:
    """Tries two updates, which are refused and change nothing. Then computes log-probs and makes three updates."""

    def mine(batches: list[list[TokenTree]]) -> list[list[TokenTree]]:
        return [split_over_ranks(groups, replicas)[replica] for groups in batches]

    batches = dp_groups()
    everything = [group for groups in batches for group in groups]
    masked = [[dataclasses.replace(g, loss_mask=np.zeros_like(g.loss_mask)) for g in groups] for groups in batches]
    seen: dict[str, Any] = {"masked": refused(lambda: train_step(backend, mine(masked), step=1))}

    def broken() -> None:
        backend.begin_step(2)
        if backend.rank == 1:
            backend.model_chunks[0].buffers[0].grad_data[0] = torch.nan
        for groups in mine(batches):
            backend.accumulate(groups)
        backend.finish_step()

    if backend.world_size > 1:
        seen["broken"] = refused(broken)
    top = backend.top_logprobs(everything, top_k=TOP_K)
    seen["top_logprobs"] = [scores.top_logprobs.tolist() for scores in top]
    seen["top_ids"] = [scores.top_ids.tolist() for scores in top]
    seen["logprobs"] = [scores.logprobs.tolist() for scores in top]
    kept = backend.top_logprobs([*map(with_teacher, everything)], top_k=TOP_K)
    seen["kept_ids"] = [scores.top_ids.tolist() for scores in kept]
    seen["kept_logprobs"] = [scores.top_logprobs.tolist() for scores in kept]
    seen["tree_logprobs"] = [logprobs.tolist() for groups in tree_batches() for logprobs in backend.logprobs(groups)]
    with_teachers = [[*map(with_teacher, groups)] for groups in batches]
    for name, groups in (
        ("plain", batches),
        ("teacher", with_teachers),
        ("trees", tree_batches()),
        ("pairs", pair_batches()),
    ):
        metrics = dataclasses.asdict(train_step(backend, mine(groups), step=3))
        del metrics["timings_ms"]
        seen[name] = metrics
    return seen


def build(folder: Path, **overrides: Any) -> MegatronBackend:
    backend = make_backend(
        folder,
        optimizer={"eps": 1e-2},
        algorithm=dataclasses.replace(PPO_CLIP, loss=loss_of_batch),
        timeout_s=300.0,
        **overrides,
    )
    assert isinstance(backend, MegatronBackend)
    return backend


def single(folder: Path) -> None:
    make_model(folder)
    (folder / "single.json").write_text(json.dumps(what_it_sees(build(folder))))


def rank_main(folder: Path, rank: int, port: int) -> None:
    from megatron.core import parallel_state

    seen = {}
    for name, sizes in LAYOUTS.items():
        parallel = parallel_config(**sizes, sequence_parallel=False)
        backend = build(folder, parallel=parallel, rank=rank, world_size=2, store_address=f"127.0.0.1:{port}")
        seen[name] = what_it_sees(backend, replica=parallel_state.get_data_parallel_rank(), replicas=sizes.get("dp", 1))
        process_group.leave()
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    sys.exit(run_alone_and_on_two_ranks(Path(sys.argv[1]), single, rank_main))
