"""The client that speaks to the configured kind of engine."""

from __future__ import annotations

from pathlib import Path

from relax_core.config.checks.model_folder import read_model_config
from relax_core.config.schema import EngineConfig
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.engines.protocol.stop_strings import StopTable


def build_client(
    engine: EngineConfig, url: str, *, model_folder: Path, token_file: Path, control_timeout_s: float | None = None
) -> EngineClient:
    """``model_folder``: of the model that it serves. ``token_file``: of the engines that the run starts; those that it
    attaches to have ``engine.token_file``, or ask for no token. ``control_timeout_s``: another one than
    engine.sync_timeout_s."""
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
