"""Checks whether a response follows verifiable instructions, with the package if-verifiable.

The package contains the registries of IFEval (Google) and IFBench (Ai2). Its download of nltk data at import is
disabled here. If the data for an instruction is missing, there is no reward, and the reason names the data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput

if TYPE_CHECKING:
    from collections.abc import Iterator

Benchmark = Literal["ifeval", "ifbench"]
DATA = ("punkt", "punkt_tab", "stopwords", "averaged_perceptron_tagger_eng")
_THINKING, _THINKING_ENDS = "<think>", "</think>"


@dataclass(frozen=True)
class InstructionConfig(RewardConfig):
    """Holds the settings of the rewards `ifeval` and `ifbench`.

    ``loose`` also checks the response without its first or last line and without asterisks. ``partial`` makes the share
    of followed instructions the reward.
    """

    loose: bool = False
    partial: bool = False


def instruction_output(given: RewardInput, config: InstructionConfig, benchmark: Benchmark) -> RewardOutput:
    """Returns 1 if the response follows all instructions of its row, else 0. The part ``share`` is the followed share.

    Thinking is not checked. The reward is None if the row cannot be read, an instruction is unknown, or its data is
    missing.
    """
    try:
        names = instruction_names(given.row)
        values = _values(given.row, len(names))
        prompt = str(given.row.get("prompt", ""))
        checkers = [
            _checker(benchmark, *name_and_values, prompt=prompt) for name_and_values in zip(names, values, strict=True)
        ]
        text = _without_thinking(given.response)
        followed = [bool(text) and _is_followed(checker, text, loose=config.loose) for checker in checkers]
    except LookupError as error:
        return RewardOutput(reward=None, reason=_missing_data(error))
    except ValueError as error:
        return RewardOutput(reward=None, reason=str(error))
    share = sum(followed) / len(followed)
    message = ", ".join(
        f"{name} {'yes' if is_followed else 'no'}" for name, is_followed in zip(names, followed, strict=True)
    )
    reward = share if config.partial else float(all(followed))
    return RewardOutput(reward=reward, exact=all(followed), parts={"share": share}, why=message)


def instruction_names(row: Mapping[str, Any]) -> list[str]:
    """Returns the names of a row's instructions. Raises ValueError if the row has no instructions."""
    names = row.get("instruction_id_list")
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"instruction_id_list={names!r}: the row needs a list of instructions' names.")
    _values(row, len(names))
    return list(names)


def _values(row: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Returns the arguments of each instruction, without arguments that are None."""
    given = row.get("kwargs")
    if given is None:
        return [{}] * count
    if (
        not isinstance(given, list | tuple)
        or len(given) != count
        or not all(isinstance(value, dict) for value in given)
    ):
        raise ValueError(f"kwargs={str(given)[:80]}: the row needs one mapping for each of {count} instructions.")
    return [{key: value for key, value in values.items() if value is not None} for values in given]


def _checker(benchmark: Benchmark, name: str, values: Mapping[str, Any], *, prompt: str) -> Any:
    known = _registry(benchmark)
    if name not in known:
        raise ValueError(f"instruction_id_list: {name} is not an instruction of {benchmark}.")
    checker = known[name](name)
    checker.build_description(**values)
    if "prompt" in (checker.get_instruction_args() or {}):
        checker.build_description(prompt=prompt)
    return checker


def _is_followed(checker: Any, text: str, *, loose: bool) -> bool:
    variants: Sequence[str] = _variants(text) if loose else [text]
    return any(bool(variant.strip()) and bool(checker.check_following(variant)) for variant in variants)


def _variants(text: str) -> list[str]:
    """Returns the response in variants: with and without its first line, its last line and its asterisks."""
    lines = text.split("\n")
    shorter = ["\n".join(kept_lines).strip() for kept_lines in (lines[1:], lines[:-1], lines[1:-1])]
    return [variant for whole in (text, *shorter) for variant in (whole, whole.replace("*", ""))]


def _without_thinking(response: str) -> str:
    text = response.strip()
    if _THINKING_ENDS in text:
        return text.split(_THINKING_ENDS, 1)[1].strip()
    return "" if text.startswith(_THINKING) else text


def _missing_data(error: LookupError) -> str:
    named = [name for name in DATA if name in str(error)]
    if not named:
        raise error
    return f"data of nltk is missing: python -m nltk.downloader {' '.join(named)}"


def check_package(name: str) -> None:
    """Raises ValueError if the package with the registries is missing.

    ``name`` is the reward that needs the package.
    """
    if find_spec("if_verifiable") is None:
        raise ValueError(f"reward={name} needs the package if-verifiable: pip install 'relax-core[rewards]'.")


def nltk_folders(config: RewardConfig) -> list[str]:
    """Returns the user's folders where nltk looks for its data."""
    return [folder for folder in os.environ.get("NLTK_DATA", "").split(os.pathsep) if folder] + ["~/nltk_data"]


@cache
def _registry(benchmark: Benchmark) -> dict[str, Any]:
    with _no_downloads():
        found: dict[str, Any] = import_module(f"if_verifiable.{benchmark}.instructions_registry").INSTRUCTION_DICT
    from langdetect import DetectorFactory

    DetectorFactory.seed = 0  # without a seed, the detected language of a text may differ between calls
    return found


def prepare(benchmark: Benchmark) -> None:
    """Imports the registry before the first answer is scored, because the import takes seconds."""
    _registry(benchmark)


@contextmanager
def _no_downloads() -> Iterator[None]:
    """Disables downloads of nltk while the package is imported."""
    import nltk

    download = nltk.download
    nltk.download = lambda *names, **settings: False
    try:
        yield
    finally:
        nltk.download = download
