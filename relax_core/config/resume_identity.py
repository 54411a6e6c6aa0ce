"""What makes a resumed run the same run, and what a user may change on the way.

Refused: whatever the checkpoint's own state was made for. With another seed or other data its cursor points into
another order, so prompts would come twice or never; its tensors belong to one model, its ledger to one group size; and
a curve that changes its algorithm, reward or environment half-way shows neither. Told, and then done: settings that
people tune on the way (learning rate, clip range, temperature, staleness). Not looked at: where and how long the run
goes, and where its data lies: data is known by its content (relax_core/data/data_identity.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

REFUSED = (
    "seed",
    "data",
    "model",
    "modality",
    "algo.name",
    "algo.group_size",
    "reward.name",
    "env.name",
    "rollout.banned_token_ids",
)
TOLD = ("algo", "optimizer", "rollout", "mode", "reward", "env", "parallel", "data.overlong", "data.max_bad_rows")
WHOLE = ("data.chat_template_kwargs", "data.paths")  # mappings whose keys are the user's: compared as one value
DATA_PLACES = ("data.name", "data.path", "data.paths", "data.eval_path")  # where the content lies


@dataclass(frozen=True, kw_only=True)
class Change:
    """A key whose value is not what the checkpoint was made with."""

    key: str
    was: Any
    now: Any

    def words(self) -> str:
        return f"{self.key} was {_word(self.was)}, is {_word(self.now)}"

    def as_it_was(self) -> str:
        """The override that takes the change back."""
        return f"{self.key}={_word(self.was)}"


def changes(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, keys: tuple[str, ...], but: tuple[str, ...] = ()
) -> list[Change]:
    """The keys at or below one of ``keys`` that differ, but those at or below one of ``but``. Both are a configuration
    as `relax_core.config.saved.plain` gives it; a key that only one has came or went with a version of Relax."""
    before, after = dict(_leaves(saved)), dict(_leaves(now))
    return [
        Change(key=key, was=before[key], now=value)
        for key, value in after.items()
        if key in before and before[key] != value and _below(key, keys) and not _below(key, but)
    ]


def _below(key: str, keys: tuple[str, ...]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in keys)


def _leaves(values: Mapping[str, Any], *, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" not in WHOLE:
            yield from _leaves(value, prefix=f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _word(value: Any) -> str:
    """As it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_word(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(_word, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
