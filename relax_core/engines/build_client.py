"""Builds the client for the configured kind of engine."""

from __future__ import annotations

from pathlib import Path

from relax_core.config.schema import EngineConfig
from relax_core.contracts.engine import REQUEST_TIMEOUT_S, SYNC_TIMEOUT_S
from relax_core.contracts.engine_kind import EngineServer
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.families.hf_config import has_hf_config, language_values, read_hf_config
from relax_core.registry import find_engine


def build_client(
    engine: EngineConfig,
    url: str,
    *,
    model_folder: Path,
    token_file: Path,
    attached: bool = False,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
    control_timeout_s: float = SYNC_TIMEOUT_S,
    media_folder: Path | None = None,
    weights_folder: Path | None = None,
) -> EngineClient:
    """Returns a client of the engine at ``url``.

    ``model_folder`` is the folder of the served model. ``token_file`` contains the token of engines that the run
    starts. External engines (``attached`` or ``engine.urls``) use the token in ``engine.token_file``, or no token.
    ``media_folder`` contains the media items of prompts; external engines cannot read it. ``weights_folder`` contains
    the published weight versions.
    """
    attached = attached or bool(engine.urls)
    if attached:
        token = Path(engine.token_file).read_text().strip() if engine.token_file is not None else ""
    else:
        token = token_file.read_text().strip()
    spec = find_engine(engine.name)
    server = EngineServer(
        url=url,
        token=token,
        attached=attached,
        engine=engine,
        model_folder=model_folder,
        request_timeout_s=request_timeout_s,
        control_timeout_s=control_timeout_s,
        media_folder=media_folder,
        weights_folder=weights_folder,
    )
    if spec.client is None:
        return EngineClient(
            url,
            token,
            request_timeout_s=server.request_timeout_s,
            control_timeout_s=server.control_timeout_s,
            attached=attached,
            vocab_size=_vocab_size(model_folder),
        )
    client = spec.client(server)
    if not isinstance(client, EngineClient):
        raise ValueError(
            f"engine.name={engine.name}: client(server) returned a {type(client).__name__}. Return an EngineClient "
            "(relax_core.engines.protocol.engine_client), or a subclass of it."
        )
    return client


def _vocab_size(model_folder: Path) -> int | None:
    """Returns the size of the model's vocabulary; None if the folder is not on this machine."""
    return int(language_values(read_hf_config(model_folder))["vocab_size"]) if has_hf_config(model_folder) else None
