"""Describes the embedded engine as a kind of engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from relax_core.config.engine_checks import attached_problems, no_media_problems, token_file_problems
from relax_core.contracts.engine_kind import EngineSpec
from relax_core.engines.embedded.embedded_launch import FEATURE_MIB, command, environment

if TYPE_CHECKING:
    from relax_core.engines.protocol.engine_client import EngineClient


def _attach(client: EngineClient, timeout_s: float, rollout: Any) -> None:
    from relax_core.engines.protocol.attached import wait_ready

    wait_ready(client, timeout_s=timeout_s)
    client.forget_weights()


def _problems(config: Any) -> Iterator[str]:
    yield from attached_problems(config)
    yield from no_media_problems(config)


SPEC = EngineSpec(
    name="embedded",
    summary="Relax's own CPU engine, one process each.",
    command=command,
    environment=environment,
    attach=_attach,
    problems=_problems,
    file_problems=lambda config: token_file_problems(config.engine),
    transports=frozenset({"shared_memory", "gloo", "disk"}),
    media=frozenset({"image", "video", "audio"}),
    feature_mib=FEATURE_MIB,
    keys=frozenset({"urls", "token_file", "prefix_cache_tokens"}),
    takes_listener=True,
)
