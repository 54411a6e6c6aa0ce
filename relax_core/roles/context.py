"""What every role's process is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relax_core.config.schema import RelaxConfig


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """One run, as its roles see it. Paths are absolute; ``namespace`` is the run's own in Ray.

    ``start_step``: train steps already done by the checkpoint in ``resume_from``, or 0.
    ``weights_folder``: where published weight versions lie (shared memory). ``token_file``: the run's bearer token.
    """

    config: RelaxConfig
    namespace: str
    run_dir: Path
    model_folder: Path
    weights_folder: Path
    token_file: Path
    resume_from: Path | None
    start_step: int

    @property
    def log_dir(self) -> Path:
        return self.run_dir / "logs"


BUS = "bus"
METRICS = "metrics"


def worker_name(role: str, rank: int) -> str:
    """Ray actor name of a role's worker."""
    return f"{role}-{rank}"
