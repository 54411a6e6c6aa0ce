"""Checks an SGLang server that the run attaches to and does not start or stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_core.config.engine_checks import MASK_TOKENS
from relax_core.config.schema import RolloutConfig
from relax_core.contracts.engine import EngineError
from relax_core.engines.protocol.attached import wait_ready
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.engines.sglang.version import version_problem


def check_server(client: EngineClient, *, timeout_s: float, rollout: RolloutConfig) -> str:
    """Waits until the server is ready and returns its version.

    Raises EngineError if the version is not supported, the server refuses the token, it is not ready within
    ``timeout_s`` seconds, or it cannot sample as ``rollout`` says.
    """
    wait_ready(client, timeout_s=timeout_s)
    info = client.server_info()
    version = str(info.get("version", "of no known version"))[:40]
    problem = version_problem(version) or truncation_problem(info, rollout) or stop_problem(info, rollout)
    if problem is not None:
        raise EngineError(f"engine {client.url}: {problem}")
    return version


def stop_problem(info: Mapping[str, Any], rollout: RolloutConfig) -> str | None:
    """Returns why the server cannot find the stop strings of ``rollout``, or None if it can."""
    if rollout.stop and info.get("skip_tokenizer_init"):
        return (
            "it was started with --skip-tokenizer-init, so it cannot look for rollout.stop. Start it without this "
            "flag, or drop rollout.stop."
        )
    return None


def truncation_problem(info: Mapping[str, Any], rollout: RolloutConfig) -> str | None:
    """Returns why the server cannot return kept sets or cannot sample under min_p, or None if it can.

    ``info`` holds the settings that the server was started with.
    """
    most = info.get("sampling_mask_max_tokens", MASK_TOKENS)
    if not isinstance(most, int):
        return f"its sampling_mask_max_tokens={str(most)[:40]!r} is no number."
    if rollout.truncates and rollout.top_k > most:
        return (
            f"rollout.top_k={rollout.top_k}, but it returns at most {most} kept tokens. Lower rollout.top_k, or start "
            f"it with --sampling-mask-max-tokens={rollout.top_k}."
        )
    if rollout.min_p > 0.0 and info.get("enable_deterministic_inference"):
        return (
            f"rollout.min_p={rollout.min_p:g}, but it was started with --enable-deterministic-inference and cannot "
            "draw by seed under min_p. Start it without this flag, or use rollout.min_p=0."
        )
    return None
