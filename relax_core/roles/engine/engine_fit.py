"""Compares what a server of somebody else was started with with what the run asks of its engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_core.families.hf_config import has_hf_config, language_values, read_hf_config
from relax_core.roles.process.role_context import RunContext

# Names of the settings in the answer of /server_info: those of SGLang, then those of the embedded engine.
SLOTS = ("max_running_requests", "max_running_samples")
TOKENS = ("max_total_num_tokens", "max_total_tokens")


@dataclass(frozen=True, kw_only=True)
class EngineNeeds:
    """Holds what the run asks of each engine.

    ``vocabulary`` is the size of the model's. ``sample_tokens`` is the largest number of prompt and response tokens of
    one sample, and ``slots`` the number of samples of a group, which an engine decodes together.
    """

    vocabulary: int
    sample_tokens: int
    slots: int


def engine_needs(context: RunContext) -> EngineNeeds:
    """Returns what this run asks of each engine."""
    return EngineNeeds(
        vocabulary=language_values(read_hf_config(context.model_folder))["vocab_size"],
        sample_tokens=context.config.engine.context_tokens,
        slots=context.config.algo.group_size,
    )


def fit_problem(info: Mapping[str, Any], needs: EngineNeeds) -> str | None:
    """Returns why a server cannot do what the run asks of it, or None.

    ``info`` are the settings that it was started with. What it does not tell is not compared here; the probe finds
    another vocabulary, too.
    """
    vocabulary = _vocabulary(info)
    if vocabulary is not None and vocabulary != needs.vocabulary:
        return (
            f"its model {info['model_path']} has {vocabulary} tokens in its vocabulary, and the run's has "
            f"{needs.vocabulary}. Start it with the run's model."
        )
    told = {
        "samples of one group at once": (_least(info, SLOTS), needs.slots),
        "tokens of one sample in its context": (_least(info, ("context_length",)), needs.sample_tokens),
        "tokens of one sample in its cache": (_least(info, TOKENS), needs.sample_tokens),
    }
    for what, (has, needed) in told.items():
        if has is not None and has < needed:
            return f"it takes {has} {what}, and the run needs {needed}. Start it with {needed} or more."
    return None


def _least(info: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Returns the smallest of these settings that is a number, or None."""
    return min((info[name] for name in names if isinstance(info.get(name), int)), default=None)


def _vocabulary(info: Mapping[str, Any]) -> int | None:
    """Returns the size of the vocabulary of the server's model, or None where its folder cannot be seen from here."""
    folder = Path(str(info.get("model_path", "")))
    return int(language_values(read_hf_config(folder))["vocab_size"]) if has_hf_config(folder) else None
