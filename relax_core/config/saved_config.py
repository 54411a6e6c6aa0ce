"""Writes a configuration without secrets as YAML for the run's folder, and compares a resumed run with the saved run.

A resume refuses changes of settings that the checkpoint's state depends on. With another seed or other data the saved
cursor would refer to a different order, so prompts would be used twice or never. The tensors belong to one model, and
the ledger to one group size. If algorithm, reward or environment changed in the middle of a run, the run's curves would
describe neither setting. A resume reports and applies changes of settings that are often tuned during a run (learning
rate, clip range, temperature, staleness). It does not compare machines, duration and data paths; data is identified by
its content (relax_core/data/data_identity.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import yaml

from relax_core.config.redaction import FromVariable, redacted

if TYPE_CHECKING:
    from relax_core.config.schema import RelaxConfig


def to_yaml(config: RelaxConfig) -> str:
    """Returns the configuration as YAML with the keys of conf/, without secrets (relax_core/config/redaction.py)."""
    text: str = yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)
    return text


def to_yaml_with_secrets(config: RelaxConfig) -> str:
    """Returns the configuration as YAML with secrets, for a file that only this user can read.

    `config_from_yaml` reads this YAML.
    """
    text: str = yaml.safe_dump(plain(config, redact=False), sort_keys=False, allow_unicode=True)
    return text


def plain(value: Any, *, redact: bool = True) -> Any:
    """Returns the configuration as dicts, lists and scalars; enums become names.

    With ``redact``, secrets are removed.
    """
    values = _plain(value, redact=redact)
    return redacted(values) if redact else values


def _plain(value: Any, *, redact: bool) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name), redact=redact) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): _plain(item, redact=redact) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, redact=redact) for item in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, FromVariable) and redact:
        return value
    return str(value) if isinstance(value, str) else value


REFUSED = (
    "seed",
    "data",
    "model",
    "modality.name",
    # These limits determine the content of media items and the set of bad prompts.
    "modality.image_tokens",
    "modality.video_fps",
    "modality.video_frames",
    "modality.frame_tokens",
    "modality.audio_seconds",
    "modality.audio_in_video",
    "algo.name",
    "algo.group_size",
    "reward.name",
    "env.name",
    "rollout.banned_token_ids",
)
REPORTED_KEYS = (
    "algo",
    "optimizer",
    "rollout",
    "mode",
    "reward",
    "env",
    "parallel",
    "data.overlong",
    "data.max_bad_rows",
)
WHOLE = (
    "data.chat_template_kwargs",
    "data.paths",
    "data.mix",
    "data.config",
)  # mappings with free keys; each is compared as one value
# The keys for the data's location and for reading the data.
DATA_LOCATION_KEYS = (
    "data.name",
    "data.path",
    "data.paths",
    "data.eval_path",
    "data.config",
    "data.media_root",
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Holds a key with a different value than in the checkpoint."""

    key: str
    was: Any
    now: Any

    def describe(self) -> str:
        """Returns the change as text, with the old and the new value."""
        return f"{self.key} was {_typed_value(self.was)}, is {_typed_value(self.now)}"

    def as_it_was(self) -> str:
        """Returns the override that restores the old value."""
        return f"{self.key}={_typed_value(self.was)}"


def changes(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, keys: tuple[str, ...], but: tuple[str, ...] = ()
) -> list[Change]:
    """Returns the changes of all keys at or below ``keys``, except keys at or below ``but``.

    Both configurations have the form of `relax_core.config.saved_config.plain`. Keys that only one of them has are
    ignored, because another version of Relax added or removed these keys.
    """
    before, after = dict(_leaves(saved)), dict(_leaves(now))
    return [
        Change(key=key, was=before[key], now=value)
        for key, value in after.items()
        if key in before and before[key] != value and _below(key, keys) and not _below(key, but)
    ]


def _below(key: str, keys: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in keys)


def _leaves(values: Mapping[str, Any], *, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" not in WHOLE:
            yield from _leaves(value, prefix=f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _typed_value(value: Any) -> str:
    """Returns the value as typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_typed_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(_typed_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
