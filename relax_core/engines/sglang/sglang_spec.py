"""Describes SGLang as a kind of engine: command line, environment, checks, and external servers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_core.config.engine_checks import MASK_TOKENS, sglang_file_problems, sglang_problems
from relax_core.config.errors import NotYet
from relax_core.config.model_checks import family_of_run
from relax_core.config.schema import RelaxConfig, RolloutConfig
from relax_core.contracts.child_process import OPENMP_WAITS
from relax_core.contracts.engine import EngineError
from relax_core.contracts.engine_kind import EngineServer, EngineSpec, EngineStart
from relax_core.contracts.private_folder import set_compile_cache
from relax_core.engines.protocol.engine_client import EngineClient, wait_ready
from relax_core.engines.sglang.media.placed_items import MEDIA_FOLDER, VISION_FOLDER
from relax_core.engines.sglang.sglang_process import version_problem
from relax_core.engines.sglang.sglang_weight_calls import LOADER
from relax_core.families.folder import audio_tower, vision_tower
from relax_core.families.hf_config import language_values, read_hf_config

if TYPE_CHECKING:
    from relax_core.engines.sglang.sglang_client import SglangClient

MEDIA_PACKAGE = "relax_core.engines.sglang.media"
SERVER = Path(__file__).with_name("sglang_process.py")
# With a context of C tokens, SGLang refuses prompts of C - 6 or more tokens. A prompt of P tokens gets at most C - P -
# 2 new tokens.
SPARE_TOKENS = 7
FEATURE_MIB = "SGLANG_VLM_CACHE_SIZE_MB"
DEFAULT_FEATURE_MIB = 100


def command(launch: EngineStart) -> list[str]:
    """Returns the command line of an SGLang server."""
    engine = launch.engine
    flags: dict[str, object] = {
        "model-path": launch.model_folder,
        "host": launch.host,
        "port": launch.port,
        "dtype": launch.dtype,
        "tp-size": engine.tp,
        "max-running-requests": engine.max_running_samples,
        "max-total-tokens": engine.max_total_tokens + SPARE_TOKENS,
        "context-length": engine.context_tokens + SPARE_TOKENS,
        "custom-weight-loader": [LOADER],
        "skip-tokenizer-init": not launch.stop_strings,
        "incremental-streaming-output": True,
        "enable-return-routed-experts": launch.return_routed_experts,
        "enable-deterministic-inference": bool(engine.deterministic),
        "log-level": "warning",
    }
    if engine.tp > 1 and launch.shard_media and _can_shard_items(launch.model_folder):
        flags["mm-enable-dp-encoder"] = True
    if launch.shared_gpus:
        flags["enable-memory-saver"] = True
    if engine.mem_fraction is not None:
        flags["mem-fraction-static"] = engine.mem_fraction
    if launch.load_weights:
        _check_head(launch.model_folder)
        flags["weight-version"] = "0"
    else:
        flags["load-format"] = "dummy"
    words = flag_arguments(flags | engine.flags)
    own = ["--token-file", str(launch.token_file)]
    if launch.listener is not None:
        own += ["--listener", str(launch.listener)]
    return [engine.python or sys.executable, "-P", str(SERVER), *own, *words]


def _check_head(folder: Path) -> None:
    """Raises EngineError for a model with a tied output layer that SGLang cannot load from the folder.

    Relax's weight loader adds the output layer to weights from the trainer, but not to weights that SGLang reads
    itself.
    """
    config = read_hf_config(folder)
    if config.get("model_type") == "qwen3_moe" and config.get("tie_word_embeddings"):
        raise EngineError(
            f"{folder}: SGLang's Qwen3-MoE does not support a tied head. Use a model with a separate head."
        )


def _can_shard_items(folder: Path) -> bool:
    """Returns whether SGLang can distribute the images and videos of a model over its tensor-parallel ranks.

    It cannot for Qwen3-Omni: SGLang 0.5.23 also splits the vision tower over the ranks, and the ranks would wait for
    each other.
    """
    return vision_tower(folder) is not None and audio_tower(folder) is None


def environment(launch: EngineStart) -> dict[str, str]:
    """Returns the environment of an SGLang server. The server must not download anything."""
    given = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    set_compile_cache(given)
    return {
        **given,
        "OMP_NUM_THREADS": str(launch.engine.cpu_threads),
        **OPENMP_WAITS,
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for SPARE_TOKENS; no position past the model's is used
        **({"GLOO_SOCKET_IFNAME": "lo"} if launch.host.startswith("127.") else {}),
        "SGLANG_MAMBA_CONV_DTYPE": launch.dtype,  # inputs of Qwen3.5's convolutions; SGLang's default is bfloat16
        "PYTHONUNBUFFERED": "1",
        **({"CUDA_VISIBLE_DEVICES": ",".join(launch.shared_gpus)} if launch.shared_gpus else {}),
        **_media_environment(launch),
    }


def _media_environment(launch: EngineStart) -> dict[str, str]:
    """Returns the variables for a model with a vision tower: SGLang then uses Relax's media processor.

    On large Hopper GPUs, SGLang 0.5.23 caches tower features of Qwen3-VL only if the size of the cache is set, because
    it expects that every image is used once. In a group, every sample uses the group's images.
    """
    if vision_tower(launch.model_folder) is None:
        return {}
    return {
        "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": MEDIA_PACKAGE,
        VISION_FOLDER: str(launch.model_folder),
        FEATURE_MIB: os.environ.get(FEATURE_MIB, str(DEFAULT_FEATURE_MIB)),
        MEDIA_FOLDER: "" if launch.media_folder is None else str(launch.media_folder),
    }


def flag_arguments(flags: Mapping[str, object]) -> list[str]:
    """Returns ``["--tp-size=2", "--trust-remote-code"]`` for ``{"tp-size": 2, "trust-remote-code": True}``.

    False flags are left out. The entries of a list follow their flag as separate arguments.
    """
    words: list[str] = []
    for name, value in flags.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words += [option] if value else []
        elif isinstance(value, list):
            words += [option, *map(str, value)]
        else:
            words.append(f"{option}={value}")
    return words


PYTHON_S = 60.0  # Maximum seconds until an interpreter has reported its SGLang version.


# Model families with a media processor of Relax.
VISION_FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "qwen3_5", "qwen3_5_moe")


def file_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a problem text for each unusable file, and for a model that SGLang cannot serve."""
    yield from sglang_file_problems(config)
    yield from vision_problems(config)
    yield from layer_problems(config)


def vision_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a problem text for a model with a vision tower that Relax cannot serve with SGLang, even for text data.

    An unknown family is ignored here, because the checks of the model report it.
    """
    family = family_of_run(config)
    if family is not None and family.vision is not None and family.name not in VISION_FAMILIES:
        yield (
            f"model.family={family.name} with engine=sglang: of the models that see it serves "
            f"{', '.join(VISION_FAMILIES)} only. Use engine=embedded."
        )


SGLANG_ROTARY_PART = 0.25  # SGLang's value for Qwen3.5 without a key partial_rotary_factor beside rope_parameters


def layer_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a problem text for a folder of a hybrid model that SGLang would compute as another model.

    SGLang 0.5.23 derives the kinds of the layers from full_attention_interval and ignores layer_types. Servers that the
    run did not start also ignore partial_rotary_factor in rope_parameters (`sglang_patches`).
    """
    family, path = family_of_run(config), config.model.path
    if family is None or family.delta_net is None or path is None:
        return
    try:
        values = language_values(read_hf_config(Path(path)))
    except (ValueError, OSError):  # the folder's check reports it
        return
    every, kinds = values.get("full_attention_interval", 4), values.get("layer_types")
    full = [layer for layer, kind in enumerate(kinds or ()) if kind == "full_attention"]
    if kinds is not None and full != list(range(every - 1, len(kinds), every)):
        yield (
            f"model.path={path} with engine=sglang: full attention is in the layers {full} of config.json, but SGLang "
            f"computes it in every {every}th layer (full_attention_interval). Use engine=embedded."
        )
    inner = (values.get("rope_parameters") or {}).get("partial_rotary_factor")
    if config.engine.urls and inner not in (None, values.get("partial_rotary_factor", SGLANG_ROTARY_PART)):
        yield (
            f"engine.urls with model.path={path}: partial_rotary_factor={inner} in rope_parameters of config.json is "
            "ignored by servers that the run did not start. Write the key beside rope_parameters, or drop engine.urls."
        )


def version_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a problem text for an interpreter without SGLang or with an unsupported version."""
    engine = config.engine
    if engine.urls or (engine.python is not None and not os.access(engine.python, os.X_OK)):
        return  # No server is started, or `file_problems` has reported the interpreter.
    python = engine.python or sys.executable
    ask = "from importlib.metadata import version; print(version('sglang'))"
    found = subprocess.run([python, "-P", "-c", ask], capture_output=True, text=True, timeout=PYTHON_S, check=False)
    if found.returncode != 0:
        yield NotYet(
            f"engine=sglang: {python} has no SGLang. On a machine with GPUs: pip install '.[gpu]'. On a CPU: "
            "make sglang-cpu, and engine.python=.venv-sglang/bin/python."
        )
    elif (problem := version_problem(found.stdout.strip())) is not None:
        yield f"engine.python={python}: {problem}"


def check_server(client: EngineClient, *, timeout_s: float, rollout: RolloutConfig) -> str:
    """Waits until the server is ready, and returns its SGLang version.

    Raises EngineError if the version is not supported, the server refuses the token, the server is not ready within
    ``timeout_s`` seconds, or the server does not support the sampling settings of ``rollout``.
    """
    wait_ready(client, timeout_s=timeout_s)
    info = client.server_info()
    version = str(info.get("version", "of no known version"))[:40]
    problem = version_problem(version) or truncation_problem(info, rollout) or stop_problem(info, rollout)
    if problem is not None:
        raise EngineError(f"engine {client.url}: {problem}")
    return version


def stop_problem(info: Mapping[str, Any], rollout: RolloutConfig) -> str | None:
    """Returns why the server cannot detect the stop strings of ``rollout``; None if it can."""
    if rollout.stop and info.get("skip_tokenizer_init"):
        return (
            "it was started with --skip-tokenizer-init, so it cannot look for rollout.stop. Start it without this "
            "flag, or drop rollout.stop."
        )
    return None


def truncation_problem(info: Mapping[str, Any], rollout: RolloutConfig) -> str | None:
    """Returns why the server cannot return kept sets or sample with min_p; None if it can.

    ``info`` has the settings of the server's start.
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


def _client(server: EngineServer) -> SglangClient:
    from relax_core.engines.protocol.stop_strings import StopTable
    from relax_core.engines.sglang.sglang_client import SglangClient

    values = language_values(read_hf_config(server.model_folder))
    return SglangClient(
        server.url,
        server.token,
        ranks=server.engine.tp,
        vocab_size=values["vocab_size"],
        seeds=bool(server.engine.deterministic),
        attached=server.attached,
        media_folder=server.media_folder,
        weights_folder=server.weights_folder,
        has_states="linear_num_value_heads" in values,  # Qwen3.5's delta nets
        stops=StopTable(server.model_folder),
        request_timeout_s=server.request_timeout_s,
        control_timeout_s=server.control_timeout_s,
    )


def _attach(client: SglangClient, timeout_s: float, rollout: Any) -> None:
    from relax_core.engines.sglang.sglang_spec import check_server

    check_server(client, timeout_s=timeout_s, rollout=rollout)
    client.forget_weights()  # The weights are from another run, or from this run before it resumed from a checkpoint.


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
    memory_mib=1450,  # Memory of its three processes on a CPU (docs/sglang.md).
    whole_cache=True,
    media=frozenset({"image", "video", "audio"}),
    attached_media=frozenset({"image"}),
    feature_mib=DEFAULT_FEATURE_MIB,
    shards_items=True,
    releases_weights=True,
    takes_listener=True,
)
