"""Computes DeepEyes' reward: 0.8 × right + 0.2 × form + 1.2 × right answer with a tool.

Source: ``compute_score`` of redai-infra/Relax (examples/deepeyes/reward_deepeyes.py) after Visual-Agent/DeepEyes. The
form is -1 if the think tags, the answer tags (after the last ``</think>``) or the tags of tool responses do not match,
if the answer tags are empty, or if the answer has 300 characters or more. Otherwise the form is 0. A response with the
form -1 is never right. A missing ``<think>`` at the beginning of a response is not an error. A tool was used if the
conversation has a tool response.

Departures. The source asks a judge whether the answer is right. This rule compares the words of answer and label, in
lower case, without punctuation and articles. A judge is a separate reward (`genrm`). In a multi-turn episode the
responses are checked as one text, and a tool's observation is a tool response. An empty label gives no reward. Numbers
must have the label's signs and decimal points. Several answer tags with different texts have the form -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared
from rewards.questions.f1 import same_numbers, squad_form
from rewards.questions.multiple_choice import has_several, tagged

RIGHT_WEIGHT, FORM_WEIGHT, TOOL_WEIGHT = 0.8, 0.2, 1.2
MAX_ANSWER_CHARS = 300
_TOOL, _TOOL_ENDS = "<tool_response>", "</tool_response>"


@dataclass(frozen=True)
class DeepEyesConfig(RewardConfig):
    """Holds the settings of the reward."""

    name: str = "deepeyes"


def score(given: RewardInput, config: DeepEyesConfig) -> RewardOutput:
    """Returns the weighted sum of the parts ``right``, ``form`` and ``tool``, or None for an empty label."""
    wanted = squad_form(given.answer)
    if not wanted:
        return RewardOutput(reward=None, reason=_unreadable(given.answer))
    text = "".join(given.turns) if given.turns else given.response
    text = text if text.startswith("<think>") else f"<think>{text}"
    behind = text.rpartition("</think>")[2].strip()
    found = tagged(behind)
    wrong = form_error(text, behind, found)
    right = float(not wrong and squad_form(found or "") == wanted and same_numbers(found or "", given.answer))
    tool = float(right and _used_tool(given, text))
    parts = {"right": right, "form": -1.0 if wrong else 0.0, "tool": tool}
    return RewardOutput(
        reward=RIGHT_WEIGHT * right + FORM_WEIGHT * parts["form"] + TOOL_WEIGHT * tool,
        exact=bool(right),
        parts=parts,
        answer=found or "",
        why=compared(found, given.answer) + (f", {wrong}" if wrong else ""),
    )


def form_error(text: str, behind: str, found: str | None) -> str:
    """Returns the error in the form of a response, or "" if the form is right."""
    if text.count("<think>") != text.count("</think>"):
        return "the think tags do not match"
    if text.count(_TOOL) != text.count(_TOOL_ENDS):
        return "the tags of tool responses do not match"
    if behind.count("<answer>") != behind.count("</answer>") or not found:
        return "there is no answer in matching tags"
    if has_several(behind):
        return "there are several answers"
    return "the answer is too long" if len(found) >= MAX_ANSWER_CHARS else ""


def _used_tool(given: RewardInput, text: str) -> bool:
    observed = any(message["role"] == "tool" or _TOOL in str(message["content"]) for message in given.messages)
    return observed or _TOOL in text


def _unreadable(label: str) -> str:
    return f"answer={label[:60]!r} has no word besides articles. Give an answer with words."


def check_row(row: Mapping[str, Any], config: DeepEyesConfig) -> None:
    """Raises ValueError for a label without words."""
    if not squad_form(str(row["answer"])):
        raise ValueError(_unreadable(str(row["answer"])))


SPEC = RewardSpec(
    name="deepeyes",
    shadow="final_answer",
    summary="DeepEyes' sum: right answer, form, right answer with a tool, by the answer's words",
    config=DeepEyesConfig,
    score=score,
    check_row=check_row,
    right_answers=lambda label, config: [f"<think></think><answer>{label}</answer>"],
)
