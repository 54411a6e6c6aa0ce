"""Returns 1 if the response passes IFEval's checks for all instructions of its row, else 0.

Source: instruction_following_eval (google-research), as maintained in the package if-verifiable 0.1.2. The row has the
columns ``instruction_id_list`` (names) and ``kwargs`` (one mapping per instruction; values that are None are ignored).
The default is the strict form: the whole response after the thinking is checked without changes.

Departures: an unknown instruction gives no reward (the package ignores it). Missing data of nltk gives no reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from relax_core.contracts.reward import RewardInput, RewardOutput, RewardSpec
from rewards.instructions.instruction_checks import (
    InstructionConfig,
    check_package,
    instruction_names,
    instruction_output,
    nltk_folders,
    prepare,
)


@dataclass(frozen=True)
class IFEvalConfig(InstructionConfig):
    """Holds the settings of the reward."""

    name: str = "ifeval"


def score(given: RewardInput, config: IFEvalConfig) -> RewardOutput:
    """Returns the reward of `instruction_output` with the registry of IFEval."""
    return instruction_output(given, config, "ifeval")


def check(config: IFEvalConfig) -> None:
    """Raises ValueError if the package with the registry is missing."""
    check_package(config.name)


def check_row(row: Mapping[str, Any], config: IFEvalConfig) -> None:
    """Raises ValueError if the row has no instructions, or if ``kwargs`` does not match them."""
    instruction_names(row)


SPEC = RewardSpec(
    name="ifeval",
    summary="IFEval: all instructions of the row are followed",
    config=IFEvalConfig,
    score=score,
    isolated=True,
    reads=nltk_folders,
    check=check,
    check_row=check_row,
    prepare=partial(prepare, "ifeval"),
)
