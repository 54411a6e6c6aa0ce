"""Makes a run context in one folder, for tests without a run."""

from __future__ import annotations

from pathlib import Path

from relax_core.config.compose import load_config
from relax_core.preflight import settle
from relax_core.roles.role_context import RunContext


def context_in(folder: Path, *overrides: str) -> RunContext:
    """Returns a context with the default configuration and ``overrides``.

    All paths are in ``folder``, which is also the model's folder. Does not create any file.
    """
    return RunContext(
        config=load_config(list(overrides), settle=settle),
        run_namespace="test",
        namespace="test-0",
        run_dir=folder,
        model_folder=folder,
        weights_folder=folder,
        token_file=folder / "token",
        resume_from=None,
        start_step=0,
    )
