"""Builds the client of the configured kind of engine."""

from __future__ import annotations

from pathlib import Path

from relax_core.config.checks.model_folder import read_model_config
from relax_core.config.schema import EngineConfig
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.engines.protocol.stop_strings import StopTable


def build_client(
    engine: EngineConfig, url: str, *, model_folder: Path, token_file: Path, control_timeout_s: float | None = None
) -> EngineClient:
    """Returns a client of the engine at ``url``.

    ``model_folder`` is the folder of the model that the engine serves. ``token_file`` holds the token of engines that
    the run starts. Engines that the run attaches to have ``engine.token_file``, or need no token.
    ``control_timeout_s`` replaces engine.sync_timeout_s, in seconds, if it is given.
    """
    if engine.urls:
        token = Path(engine.token_file).read_text().strip() if engine.token_file is not None else ""
    else:
        token = token_file.read_text().strip()
    timeouts = {
        "request_timeout_s": engine.request_timeout_s,
        "control_timeout_s": control_timeout_s or engine.sync_timeout_s,
    }
    if engine.name == "sglang":
        from relax_core.engines.sglang.client.sglang_client import SglangClient

        return SglangClient(
            url,
            token,
            ranks=engine.tp,
            vocab_size=read_model_config(model_folder)["vocab_size"],
            seeds=bool(engine.deterministic),
            attached=bool(engine.urls),
            stops=StopTable(model_folder),
            **timeouts,
        )
    return EngineClient(url, token, **timeouts)
