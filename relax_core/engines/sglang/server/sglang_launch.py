"""Builds the command line and the environment that start an SGLang server."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from relax_core.contracts.engine import EngineError
from relax_core.contracts.engine_kind import EngineStart
from relax_core.contracts.host.private_folder import set_compile_cache
from relax_core.engines.sglang.client.sglang_weight_calls import LOADER
from relax_core.engines.sglang.media.placed_items import MEDIA_FOLDER, VISION_FOLDER
from relax_core.families.folder import audio_tower, vision_tower
from relax_core.families.hf_config import read_hf_config

MEDIA_PACKAGE = "relax_core.engines.sglang.media"
SERVER = Path(__file__).with_name("sglang_process.py")
# With a context of C tokens SGLang refuses prompts of C - 6 tokens or more, and a prompt of P tokens gets at most
# C - P - 2 new tokens.
SPARE_TOKENS = 7
FEATURE_MIB = "SGLANG_VLM_CACHE_SIZE_MB"
DEFAULT_FEATURE_MIB = 100


def command(launch: EngineStart) -> list[str]:
    """Returns the command line of an SGLang server."""
    engine = launch.engine
    flags: dict[str, object] = {
        "model-path": launch.model_folder,
        "host": engine.host,
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
    if engine.tp > 1 and launch.shard_media and _can_deal_items(launch.model_folder):
        flags["mm-enable-dp-encoder"] = True
    if engine.mem_fraction is not None:
        flags["mem-fraction-static"] = engine.mem_fraction
    if launch.load_weights:
        _check_head(launch.model_folder)
        flags["weight-version"] = "0"
    else:
        flags["load-format"] = "dummy"
    words = flag_words(flags | engine.flags)
    return [engine.python or sys.executable, "-P", str(SERVER), "--token-file", str(launch.token_file), *words]


def _check_head(folder: Path) -> None:
    """Raises EngineError for a tied output layer that SGLang cannot read from the folder.

    Relax's loader supplies it for weights that the trainer sends, but not for those that SGLang reads itself.
    """
    config = read_hf_config(folder)
    if config.get("model_type") == "qwen3_moe" and config.get("tie_word_embeddings"):
        raise EngineError(f"{folder}: SGLang's Qwen3-MoE has no tied head. Use a model with a head of its own.")


def _can_deal_items(folder: Path) -> bool:
    """Returns True if SGLang's tensor-parallel ranks can share the images and videos of a model.

    The vision tower of Qwen3-Omni is split over the ranks in SGLang 0.5.23 even where images are dealt to them, so that
    ranks would wait for each other.
    """
    return vision_tower(folder) is not None and audio_tower(folder) is None


def environment(launch: EngineStart) -> dict[str, str]:
    """Returns the environment of an SGLang server, which must not download anything."""
    given = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    set_compile_cache(given)
    return {
        **given,
        "OMP_NUM_THREADS": str(launch.engine.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for SPARE_TOKENS; no position past the model's is used
        **({"GLOO_SOCKET_IFNAME": "lo"} if launch.engine.host.startswith("127.") else {}),
        "PYTHONUNBUFFERED": "1",
        **_media_environment(launch),
    }


def _media_environment(launch: EngineStart) -> dict[str, str]:
    """Returns what a model with a vision tower needs; SGLang then uses Relax's processor of images and videos.

    On large Hopper GPUs SGLang 0.5.23 keeps no tower features of a Qwen3-VL unless the size of their cache is set,
    because it expects that every image is used once. A group uses its images once for each answer.
    """
    if vision_tower(launch.model_folder) is None:
        return {}
    return {
        "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": MEDIA_PACKAGE,
        VISION_FOLDER: str(launch.model_folder),
        FEATURE_MIB: os.environ.get(FEATURE_MIB, str(DEFAULT_FEATURE_MIB)),
        MEDIA_FOLDER: "" if launch.media_folder is None else str(launch.media_folder),
    }


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """Returns ``["--tp-size=2", "--trust-remote-code"]`` for ``{"tp-size": 2, "trust-remote-code": True}``.

    A flag that is false is left out. A list follows its flag as several words.
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
