"""Describes the embedded engine as a kind of engine."""

from __future__ import annotations

from relax_core.contracts.engine_kind import EngineSpec
from relax_core.engines.embedded.embedded_launch import command, environment

SPEC = EngineSpec(
    name="embedded",
    summary="Relax's own CPU engine, one process each.",
    command=command,
    environment=environment,
    transports=frozenset({"shared_memory", "gloo", "disk"}),
    media=frozenset({"image", "video", "audio"}),
    feature_mib=256,
    keys=frozenset({"prefix_cache_tokens"}),
)
