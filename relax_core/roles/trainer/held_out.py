"""Evaluates an algorithm on data rows: its loss and metrics on held-out rows, computed by the actor's ranks.

The denominators are those of one update with all rows of an evaluation set. Log-probs of the reference come from the
initial weights, which the ranks have before they load a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relax_core.config.engine_checks import offline_rows
from relax_core.config.schema import RelaxConfig
from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import LossInputs, StepTotals
from relax_core.contracts.data import BadRow
from relax_core.contracts.tree import TokenTree
from relax_core.data.eval_sets import check_bad_rows, eval_sets, held_out_count
from relax_core.data.sources import make_source
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.observe.event_log import EVAL, EventWriter
from relax_core.registry import find_algorithm
from relax_core.roles.role_context import RunContext
from relax_core.roles.trainer.worker_group import WorkerGroup
from relax_core.rollout.evaluator import eval_versions, eval_where
from relax_core.rollout.group_advantages import advantage_extras, needs_whole_step
from relax_core.rollout.offline_rows import OfflineRows, partner_rows


@dataclass(frozen=True, kw_only=True)
class HeldOutSet:
    """Holds the trees of an evaluation set, the log-probs of the reference, and the number of rows without a tree."""

    name: str
    trees: Sequence[TokenTree]
    reference: Sequence[np.ndarray] | None
    bad_rows: int


class HeldOut:
    """Evaluates the versions ``versions`` on ``sets``, and records the values with ``metrics``."""

    def __init__(
        self,
        config: RelaxConfig,
        worker_group: WorkerGroup,
        metrics: EventWriter,
        *,
        sets: Sequence[HeldOutSet],
        versions: Sequence[int],
    ) -> None:
        self._config, self._worker_group, self._metrics = config, worker_group, metrics
        self._sets, self._versions = sets, frozenset(versions)

    def evaluate(self, version: int) -> None:
        """Records the evaluation of ``version``, the version of the current weights, if it is due."""
        if version not in self._versions:
            return
        found = [self._values(held_out) for held_out in self._sets]
        values = dict(found[0])
        for held_out, its in zip(self._sets, found, strict=True):
            values |= {f"{held_out.name}/{name}": value for name, value in its.items() if held_out.name}
        self._metrics.record(EVAL, version, values)

    def _values(self, held_out: HeldOutSet) -> dict[str, float]:
        counts = {"rows": float(len(held_out.trees)), "bad_rows": float(held_out.bad_rows)}
        if not held_out.trees:
            return counts
        logprobs = self._worker_group.logprobs(held_out.trees)
        return loss_values(self._config, held_out.trees, logprobs, held_out.reference) | counts


def open_held_out(context: RunContext, worker_group: WorkerGroup, metrics: EventWriter) -> HeldOut | None:
    """Returns the evaluation, or None if the run has engines or evaluates nothing.

    Call it while the ranks have the initial weights. Raises ValueError if too many rows of a set cannot be used.
    """
    config, kind = context.config, offline_rows(context.config)
    if kind is None or not config.eval.every:
        return None
    source = make_source(config.data, seed=config.seed, eval_rows=held_out_count(config), offline=kind)
    rows = OfflineRows(
        tokenizer=PromptTokenizer(
            context.model_folder,
            template_arguments=config.data.chat_template_kwargs,
            date=config.data.template_date,
        ),
        kind=kind,
        max_tokens=config.engine.context_tokens,
        banned=config.rollout.banned(),
    )
    needs_reference = find_algorithm(config.algo.name).requirements(config.algo).reference
    sets = []
    for eval_set in eval_sets(config, source, offline=kind):
        trees, bad = [], list(eval_set.bad)
        for number, row in enumerate(eval_set.rows):
            where = eval_where(eval_set.name, number)
            partners = partner_rows(number, count=len(eval_set.rows), read=eval_set.rows.__getitem__)
            try:
                trees.append(rows.tree(row, where=where, uid=where, version=0, partners=partners))
            except BadRow as error:
                bad.append(error)
        check_bad_rows(eval_set.name, len(trees), bad, most=config.data.max_bad_rows)
        reference = worker_group.logprobs(trees) if needs_reference and trees else None
        sets.append(HeldOutSet(name=eval_set.name, trees=trees, reference=reference, bad_rows=len(bad)))
    versions = eval_versions(every=config.eval.every, start=context.start_step, total_steps=config.run.steps)
    return HeldOut(config, worker_group, metrics, sets=sets, versions=versions)


def loss_values(
    config: RelaxConfig,
    trees: Sequence[TokenTree],
    logprobs: Sequence[np.ndarray],
    reference: Sequence[np.ndarray] | None,
) -> dict[str, float]:
    """Returns the algorithm's loss and metrics over ``trees``; log-probs are float32 ``[rows]`` for each tree.

    The trees are evaluated as one train step, so they are all groups of its ``normalize``.
    """
    spec = find_algorithm(config.algo.name)
    requirements = spec.requirements(config.algo)

    def of_tokens(columns: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(
            np.concatenate([column[tree.tokens[1]] for tree, column in zip(trees, columns, strict=True)])
        )

    sizes = [len(tree.episodes) for tree in trees]
    before = np.cumsum([0, *sizes])
    loss_mask = of_tokens([tree.loss_mask for tree in trees])
    found = of_tokens(logprobs)
    advantages = torch.ones_like(found)
    if needs_whole_step(spec, requirements):
        columns = {c.OLD_LOGPROBS: logprobs} | ({} if reference is None else {c.REFERENCE_LOGPROBS: reference})
        known = [
            tree.with_extras(**{name: values[number] for name, values in columns.items()})
            for number, tree in enumerate(trees)
        ]
        made = advantage_extras(known, spec, config.algo)
        advantages = torch.from_numpy(np.concatenate([extras[c.ADVANTAGES] for extras in made]))
    inputs = LossInputs(
        logprobs=found,
        old_logprobs=found if requirements.old_logprobs == "actor_fwd" else torch.zeros_like(found),
        rollout_logprobs=torch.zeros_like(found),
        advantages=advantages,
        loss_mask=loss_mask,
        sample_ids=torch.from_numpy(
            np.concatenate([tree.tokens[0] + first for tree, first in zip(trees, before, strict=False)])
        ),
        num_samples=int(before[-1]),
        reference_logprobs=None if reference is None else of_tokens(reference),
        group_ids=torch.from_numpy(np.repeat(np.arange(len(trees)), sizes)),
    )
    outputs = spec.loss(inputs, config.algo)
    totals = StepTotals(tokens=int(loss_mask.sum()), samples=int(before[-1]), groups=len(trees))
    return {"loss": float(outputs.loss_sum) / spec.denominator(totals, config.algo)} | _means(outputs.metric_sums)


def _means(sums: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    return {name: float(total) / float(count) for name, (total, count) in sums.items() if float(count)}
