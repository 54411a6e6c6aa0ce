"""The processes of `benchmarks.parity --media`: ranks and references. `benchmarks.parity_ranks` does it for text."""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.parity_case import OPTIMIZER, Outcome
from benchmarks.parity_data import one_sample_each, save_rollout, with_rollout
from benchmarks.parity_huggingface import huggingface_steps
from benchmarks.parity_media import (
    CASES,
    DENSE,
    EXPERT_COUNT,
    EXPERTS,
    HYBRID,
    HYBRID_CASES,
    HYBRID_EXPERTS,
    LAYERS,
    PER_TOKEN,
    Items,
    huggingface_logits,
    make_case,
    make_model,
    published,
)
from benchmarks.parity_omni import (
    OMNI,
    OMNI_CASES,
    OmniItems,
    make_omni_case,
    make_omni_model,
    omni_logits,
    published_thinker,
)
from benchmarks.parity_ranks import make_backend, run_steps
from relax_core.config.schema import OptimizerConfig
from relax_core.contracts.media_file import FolderReader
from relax_core.contracts.tree import TokenTree
from relax_core.families.folder import folder_architecture
from relax_core.families.towers import Towers
from relax_core.train import process_group
from relax_core.train.hf.hf_weights import HfWeights
from relax_core.train.model import delta_net
from relax_core.train.policy_backend import MegatronBackend
from tests.trees import with_experts, with_tokens

STEPS = 3
FAMILIES = (DENSE, EXPERTS, OMNI, HYBRID, HYBRID_EXPERTS)
SLOWER = dataclasses.replace(OPTIMIZER, lr=OPTIMIZER.lr / 3)  # keeps rounding small in the third step
# The norm after a gated delta net amplifies the rounding of each step a hundred times in log-probs.
SLOWEST = dataclasses.replace(OPTIMIZER, lr=OPTIMIZER.lr / 30)


def settings_of(family: str) -> OptimizerConfig:
    return SLOWEST if family in (HYBRID, HYBRID_EXPERTS) else SLOWER


def _make(folder: Path, family: str) -> Any:
    return make_omni_model(folder / family) if family == OMNI else make_model(folder / family, family)


def _cases_of(family: str) -> Iterable[str]:
    if family == OMNI:
        return OMNI_CASES
    return HYBRID_CASES if family in (HYBRID, HYBRID_EXPERTS) else CASES


def groups_of(folder: Path, family: str, case: str, packing: str) -> list[TokenTree]:
    """Returns the groups of a case. With "replay" the groups have random experts to replay."""
    if family == OMNI:
        groups = make_omni_case(case, OmniItems(folder / family, folder / "media"))
    else:
        groups = make_case(case, Items(folder / family, folder / "media"))
    if packing == "replay":
        random = np.random.default_rng(2)
        shape = (LAYERS, EXPERT_COUNT)
        groups = [
            with_experts(
                tree, random.random((tree.computed_rows, *shape)).argsort(-1)[..., :PER_TOKEN].astype(np.uint8)
            )
            for tree in groups
        ]
    return one_sample_each(groups) if packing == "plain" else groups


def with_saved_rollout(folder: Path, name: str, groups: Sequence[TokenTree]) -> list[TokenTree]:
    ends = np.cumsum([int(group.lengths.sum()) for group in groups])[:-1]
    return [
        with_tokens(group, logprobs=mine)
        for group, mine in zip(groups, np.split(np.load(folder / f"{name}.npy"), ends), strict=True)
    ]


def steps(
    backend: MegatronBackend,
    groups: Sequence[TokenTree],
    *,
    replica: int,
    layout: Mapping[str, Any],
    count: int = STEPS,
) -> Outcome:
    """Returns the outcome of some steps. Includes the first step's gradients if each rank has complete gradients."""
    gradients: dict[str, Tensor] = {}
    whole = not layout.get("distributed_optimizer")

    def keep_gradients() -> None:
        if whole and not gradients:
            of_models = HfWeights(backend.models, backend.architecture, tensor_of=_gradient)
            found = {name: tensor.cpu().clone() for name, tensor in of_models.export()}
            gradients.update(found or {"": torch.zeros(())})

    outcome = run_steps(
        backend, groups, replica=replica, layout=layout, order=in_turns, steps=count, after_step=keep_gradients
    )
    return dataclasses.replace(outcome, gradients=gradients)


def _gradient(parameter: Any) -> Tensor:
    gradient: Tensor = parameter.main_grad
    return gradient


@contextmanager
def recurrent_rule() -> Iterator[None]:
    """Computes gated delta nets row by row in the trainer and in transformers.

    The chunked rule of transformers has an error of 1e-2 in the gradients of the decay's parameters in float32.
    """
    from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as experts

    usual = delta_net.CHUNK_ROWS, dense.torch_chunk_gated_delta_rule, experts.torch_chunk_gated_delta_rule
    delta_net.CHUNK_ROWS = 1
    dense.torch_chunk_gated_delta_rule = dense.torch_recurrent_gated_delta_rule
    experts.torch_chunk_gated_delta_rule = experts.torch_recurrent_gated_delta_rule
    try:
        yield
    finally:
        delta_net.CHUNK_ROWS, dense.torch_chunk_gated_delta_rule, experts.torch_chunk_gated_delta_rule = usual


def in_turns(step: int, groups: Sequence[TokenTree]) -> Sequence[TokenTree]:
    """Returns the groups, in reverse order in every second step. Otherwise the text group is last: then overlapped
    gradient reduction fails unless text passes a tower, too.
    """
    return groups if step % 2 else groups[::-1]


def rank_main(folder: Path, *, rank: int, ranks: int, port: int, rows: Sequence[Any]) -> None:
    """Computes all rows of the table with ``ranks`` ranks. Rank 0 writes a line to ``<ranks>.jsonl`` for each row."""
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    reader = FolderReader(folder / "media")
    where = ""
    try:
        for row in rows:
            for packing in row.packings:
                where, name = f"{row.name}, {packing}", f"{row.family}.mixed {packing}"
                groups = with_saved_rollout(folder, name, groups_of(folder, row.family, "mixed", packing))
                backend = make_backend(
                    folder,
                    family=row.family,
                    layout=row.layout,
                    rank=rank,
                    ranks=ranks,
                    port=port,
                    media=reader,
                    optimizer=settings_of(row.family),
                )
                replica = parallel_state.get_data_parallel_rank()
                outcome = steps(backend, groups, replica=replica, layout=row.layout)
                if rank == 0:
                    figures = outcome.difference(Outcome.read(folder / f"{name}.safetensors"))
                    line = {"name": row.name, "packing": packing, **figures}
                    with (folder / f"{ranks}.jsonl").open("a") as file:
                        file.write(json.dumps(line) + "\n")
            process_group.leave()
    except BaseException:
        (folder / f"{ranks}.{rank}.error").write_text(f"{where}: {traceback.format_exc()}")
        raise


def reference_main(folder: Path, *, families: Container[str], cases: Container[str] = ()) -> None:
    """Compares Hugging Face with the single process for ``families``, as trees and as rows. By default in every case,
    otherwise in ``cases``.
    """
    torch.set_num_threads(1)
    with (folder / "1.jsonl").open("w") as lines:
        for family in FAMILIES:
            if family not in families:
                continue
            _make(folder, family)
            for case in _cases_of(family):
                if cases and case not in cases:
                    continue
                for line in _case(folder, family, case):
                    lines.write(json.dumps(line) + "\n")


def _case(folder: Path, family: str, case: str) -> list[dict[str, Any]]:
    """Returns the lines of a case. In the case "mixed" the single process writes its outcomes for the layouts."""
    reader = FolderReader(folder / "media")
    alone: dict[str, Any] = {"layout": {}, "rank": 0, "ranks": 1, "port": 0}
    backend = partial(make_backend, folder, family=family, media=reader, optimizer=settings_of(family), **alone)
    lines = []
    towers = Towers.of(folder_architecture(folder / family))
    assert towers is not None and towers.vision is not None
    tower = towers.vision
    plain = groups_of(folder, family, case, "tree")
    plain = with_rollout(plain, backend().logprobs(plain))
    packings = {"tree": plain, "plain": one_sample_each(plain)}
    if family not in (DENSE, HYBRID) and case == "mixed":
        replayed = groups_of(folder, family, case, "replay")
        packings["replay"] = with_rollout(replayed, backend().logprobs(replayed))

    def logits(model: Any, samples: Sequence[TokenTree]) -> list[Tensor]:
        if family == OMNI:
            return [omni_logits(model, sample, reader, towers) for sample in samples]
        return [huggingface_logits(model, sample, reader, tower) for sample in samples]

    with recurrent_rule():
        expected = huggingface_steps(
            _make(folder, family),
            plain,
            steps=STEPS,
            settings=settings_of(family),
            logits=logits,
            published=published_thinker if family == OMNI else partial(published, family),
        )
    for packing, groups in packings.items():
        outcome = steps(backend(), groups, replica=0, layout={})
        if case == "mixed":
            outcome.save(folder / f"{family}.mixed {packing}.safetensors")
            save_rollout(folder, family, f"mixed {packing}", groups)
        if packing != "replay":
            figures = expected.difference(outcome)
            if family in (HYBRID, HYBRID_EXPERTS):
                with recurrent_rule():
                    outcome = steps(backend(), groups, replica=0, layout={}, count=1)
            figures["each_gradient"] = outcome.each_gradient(expected)
            lines.append({"name": f"Hugging Face, {family}: {case}", "packing": packing, **figures})
    return lines
