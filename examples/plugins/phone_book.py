"""An env with a tool: the model must look up the answer in a phone book."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from relax_core.contracts.env import Action, BaseInteractionEnv, EnvSpec, EpisodeStart, InteractionConfig, StepResult
from relax_core.contracts.tool_calls import ToolMistake, call_tool

NUMBERS = {"ann": "4711", "ben": "0815", "eve": "3141"}


@dataclass(frozen=True)
class PhoneBookConfig(InteractionConfig):
    name: str = "phone_book"
    max_turns: int = 4


def look_up(person: Annotated[str, "a first name"]) -> str:
    """Returns the phone number of a person."""
    return NUMBERS.get(person.lower(), "not in the book")


class PhoneBook(BaseInteractionEnv):
    """Runs one episode. Its question depends on the group's seed, so that a group has one question."""

    def __init__(self, start: EpisodeStart, config: PhoneBookConfig) -> None:
        self.person = random.Random(start.group_seed).choice(sorted(NUMBERS))

    def reset(self) -> str:
        return f"What is the phone number of {self.person}?"

    def step(self, action: Action) -> StepResult:
        if action.parse_error:  # the model gets the error of an unreadable call
            return StepResult(observation=action.parse_error)
        if not action.tool_calls:
            return StepResult(reward=float(NUMBERS[self.person] in action.content), done=True)
        results = []
        for call in action.tool_calls:
            try:
                results.append(call_tool([look_up], call))
            except ToolMistake as mistake:
                results.append(str(mistake))
        return StepResult(observation=[{"role": "tool", "content": text} for text in results])


def tools(row: Mapping[str, Any], config: PhoneBookConfig) -> Sequence[Callable[..., Any]]:
    return [look_up]


SPEC = EnvSpec(
    name="phone_book", summary="a number that stands in a book", config=PhoneBookConfig, open=PhoneBook, tools=tools
)
