"""Defines the settings and paths that every role's process gets at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relax_core.config.schema import RelaxConfig
from relax_core.observe.event_log import EventWriter


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Holds a run's settings and paths for its roles. Paths are absolute.

    ``run_namespace`` is the run's Ray namespace. ``namespace`` is this attempt's Ray namespace, which contains the
    attempt's services. Restarted services get a new namespace, so processes of an earlier attempt cannot find them.

    ``attempt`` is the number of the attempt in the event log. ``restarted`` is True if the services of this run were
    started before; a failed start is then not caused by the configuration. ``start_step`` is the number of train steps
    in the checkpoint ``resume_from``, or 0. ``data_digest`` is the digest of the training data if the data is in files
    (`relax_core.data.data_identity`). ``weights_folder`` contains this attempt's weight versions (shared memory).
    ``token_file`` contains the run's bearer token. ``teacher_folders`` maps the teachers of a distillation to their
    model folders. ``judge_folders`` maps the judges with engines of the run to their model folders. ``media_folder``
    contains the files of the media items (shared memory). It is None in a text-only run. In an external Ray cluster
    each node has a separate folder next to ``media_folder``, which `relax_core.roles.process_placement.on_this_node`
    returns. ``gpus`` are the ids of the run's GPUs on the controller's machine.
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
    attempt: int = 0
    restarted: bool = False
    data_digest: str = ""
    teacher_folders: Mapping[str, Path] = field(default_factory=dict)
    judge_folders: Mapping[str, Path] = field(default_factory=dict)
    media_folder: Path | None = None
    gpus: tuple[str, ...] = ()

    @property
    def log_dir(self) -> Path:
        """Returns the folder of the roles' log files."""
        return self.run_dir / "logs"

    def event_writer(self, worker: str) -> EventWriter:
        """Returns a worker's writer of the event log."""
        return EventWriter(self.run_dir, worker, attempt=self.attempt)

    @property
    def shared_weights(self) -> Path:
        """Returns the folder of the weights for external servers, which is in the run's folder."""
        if self.weights_folder.is_relative_to(self.run_dir):
            return self.weights_folder
        return self.run_dir / self.weights_folder.parent.name / self.weights_folder.name


BUS = "bus"
ENGINE = "engine"  # the role of the owners of sampling engines
TEACHER_ENGINE = "teacher_engine"  # the role of the owners of teachers' engines
JUDGE_ENGINE = "judge_engine"  # the role of the owners of judges' engines


def worker_name(role: str, rank: int) -> str:
    """Returns the Ray actor name of a role's worker."""
    return f"{role}-{rank}"
