"""What every role's process is told when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relax_core.config.schema import RelaxConfig


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """One run, as its roles see it. Paths are absolute.

    ``run_namespace``: the run's own in Ray; metrics live there from its start to its end. ``namespace``: of this
    attempt. All other services live there; when they are started again it is a new one, so that whoever is left of
    the old ones finds nobody.
    ``start_step``: train steps already done by the checkpoint in ``resume_from``, or 0.
    ``data_digest``: of the training data's content, where it is in files (`relax_core.data.data_identity`).
    ``weights_folder``: where this attempt's weight versions lie (shared memory). ``token_file``: the run's bearer
    token.
    """

    config: RelaxConfig
    run_namespace: str
    namespace: str
    run_dir: Path
    model_folder: Path
    weights_folder: Path
    token_file: Path
    resume_from: Path | None
    start_step: int
    data_digest: str = ""
    teacher_folders: Mapping[str, Path] = field(default_factory=dict)  # of a distillation's teachers, by name

    @property
    def log_dir(self) -> Path:
        return self.run_dir / "logs"


BUS = "bus"
METRICS = "metrics"
TEACHER_ENGINE = "teacher_engine"  # the role that owns an engine a teacher


def worker_name(role: str, rank: int) -> str:
    """Ray actor name of a role's worker."""
    return f"{role}-{rank}"
