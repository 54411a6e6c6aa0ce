"""Describes SGLang as a kind of engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_core.config.engine_checks import sglang_problems
from relax_core.contracts.engine_kind import EngineServer, EngineSpec
from relax_core.engines.sglang.checks import file_problems, version_problems
from relax_core.engines.sglang.server.sglang_launch import DEFAULT_FEATURE_MIB, command, environment

if TYPE_CHECKING:
    from relax_core.engines.sglang.client.sglang_client import SglangClient


def _client(server: EngineServer) -> SglangClient:
    from relax_core.engines.protocol.stop_strings import StopTable
    from relax_core.engines.sglang.client.sglang_client import SglangClient
    from relax_core.families.hf_config import language_values, read_hf_config

    return SglangClient(
        server.url,
        server.token,
        ranks=server.engine.tp,
        vocab_size=language_values(read_hf_config(server.model_folder))["vocab_size"],
        seeds=bool(server.engine.deterministic),
        attached=server.attached,
        media_folder=server.media_folder,
        weights_folder=server.weights_folder,
        stops=StopTable(server.model_folder),
        request_timeout_s=server.request_timeout_s,
        control_timeout_s=server.control_timeout_s,
    )


def _attach(client: SglangClient, timeout_s: float, rollout: Any) -> None:
    from relax_core.engines.sglang.client.attached_server import check_server

    check_server(client, timeout_s=timeout_s, rollout=rollout)
    client.forget_weights()  # They are another run's, or those of this run before it was taken back to a checkpoint.


SPEC = EngineSpec(
    name="sglang",
    summary="SGLang's servers, started by the run or attached to by URL.",
    command=command,
    environment=environment,
    client=_client,
    attach=_attach,
    keys=frozenset({"python", "urls", "token_file", "mem_fraction", "deterministic", "flags"}),
    problems=sglang_problems,
    file_problems=file_problems,
    start_problems=version_problems,
    on_gpus=True,
    scratch=True,
    transports=frozenset({"shared_memory", "gloo", "nccl", "disk"}),
    memory_mib=1450,  # Its three processes take as much on a CPU (docs/sglang.md).
    whole_cache=True,
    media=frozenset({"image", "video", "audio"}),
    attached_media=frozenset({"image"}),
    feature_mib=DEFAULT_FEATURE_MIB,
    deals_items=True,
    takes_listener=True,
)
