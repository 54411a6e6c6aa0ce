"""Computes bytes that are sent or stored: a weight sync, a checkpoint, the kept sets of a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relax_core.config.checks.freeze_keys import frozen_parts
from relax_core.config.checks.model_folder import family_of_run
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.algorithm import Requirements
from relax_core.contracts.trees.kept_tokens import set_bytes
from relax_core.plan.memory.memory_terms import dtype_bytes, optimizer_bytes_a_parameter
from relax_core.plan.memory.trainer_share import trained_share
from relax_core.plan.model.dimensions import ModelDimensions
from relax_core.plan.workload import Workload
from relax_core.train.hf.stored_weights import passed_bytes
from relax_core.train.parallel_layout import one_rank
from relax_core.weights.transports.choice import choose_transport

VERSIONS_KEPT = 2  # versions of published weights (weights/publisher.py)


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Holds the bytes that a run sends and stores.

    ``sync_bytes`` is one published version, which every receiver reads. ``published_bytes`` is what the kept versions
    take. ``checkpoint_bytes`` is one checkpoint; ``checkpoints_kept`` are kept. ``transport`` says how a version
    reaches the engines, and ``transport_reason`` why. ``kept_set_bytes`` is the most that the kept set of a sampled
    token takes, and ``kept_step_bytes`` those of all tokens of a train step; both are 0 if nothing is left out.
    ``passed_bytes`` are those of tensors that are not computed and that each export copies from the model's folder.
    """

    transport: str
    transport_reason: str
    sync_bytes: int
    receivers: int
    published_bytes: int
    checkpoint_bytes: int
    checkpoints_kept: int
    kept_set_bytes: int
    kept_step_bytes: int
    passed_bytes: int


def find_transfers(
    config: RelaxConfig, requirements: Requirements, *, model: ModelDimensions, work: Workload
) -> Transfers:
    """Returns the transfers.

    A checkpoint has the model's weights and Adam's states of those that train, and with a critic twice that.
    """
    sync = model.parameters * dtype_bytes(config)
    trained = 2 if requirements.critic else 1
    learnt = trained_share(one_rank(config.parallel), model, frozen=frozen_parts(config)).parameters
    checkpoint = trained * (model.parameters * dtype_bytes(config) + learnt * optimizer_bytes_a_parameter(config))
    choice = choose_transport(config)
    rollout, kept = config.rollout, 0
    if rollout.truncates:
        most = min(rollout.top_k, model.vocabulary) if rollout.top_k > 0 else model.vocabulary
        kept = set_bytes(most, vocab_size=model.vocabulary)
    return Transfers(
        transport=choice.name.value,
        transport_reason=choice.reason,
        sync_bytes=sync,
        receivers=config.engine.count + (requirements.old_logprobs == "actor_fwd"),
        published_bytes=(VERSIONS_KEPT + 1) * sync,  # the next one is written before the oldest is removed
        checkpoint_bytes=checkpoint,
        checkpoints_kept=config.run.keep_last,
        kept_set_bytes=kept,
        kept_step_bytes=kept * work.groups * work.group_size * work.new_tokens,
        passed_bytes=_passed_bytes(config),
    )


def _passed_bytes(config: RelaxConfig) -> int:
    family = family_of_run(config)
    if family is None or config.model.path is None:
        return 0
    try:
        return passed_bytes(Path(config.model.path), family.passed)
    except (ValueError, OSError):
        return 0  # the check of the folder reports it
