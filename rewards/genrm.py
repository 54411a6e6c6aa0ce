"""LLM-as-a-judge rewards: a judge model compares a response with a reference, another answer, or a rubric.

Each form is a preset: a prompt template in ``rewards/judges/`` and a parser. The form "deepeyes" has the weights and
the format rule of DeepEyes (arXiv 2505.14362). A verdict must be the judge's whole text. DeepEyes accepts a "1"
anywhere in the text, so it would accept the verdict "10".
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_core.contracts.judge import (
    JudgeCheckConfig,
    JudgeConfig,
    JudgedInput,
    JudgePlan,
    JudgeSetup,
    Verdict,
)
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec

_TEMPLATES = Path(__file__).parent / "judges"
_ANSWER_CHARS = 300  # DeepEyes' limit in characters; a longer answer is malformed
_RIGHT, _FORM, _WITH_TOOL = 0.8, 0.2, 1.2  # weights of DeepEyes
_THOUGHT = "</think>"


@dataclass(frozen=True, kw_only=True)
class JudgePreset:
    """Holds a preset: template, parser, and the required (``needs``) and allowed (``knows``) template variables."""

    template: str
    parse: str
    needs: tuple[str, ...]
    knows: tuple[str, ...]


_LINE = r"(?im)^\W*(?:(?:final\s+)?(?:verdict|answer|score)\W+)?(?P<verdict>{values})\W*$"
_REFERENCE = ("question", "reference", "response")
_COMPARES = JudgePreset(
    template="consistency.jinja", parse=_LINE.format(values="[01]"), needs=("response",), knows=_REFERENCE
)
FORMS = {
    "consistency": _COMPARES,
    "deepeyes": _COMPARES,
    "pairwise": JudgePreset(
        template="pairwise.jinja",
        parse=_LINE.format(values="A|B|tie"),
        needs=("first", "second"),
        knows=("question", "first", "second"),
    ),
    "rubric": JudgePreset(
        template="rubric.jinja",
        parse=_LINE.format(values="yes|no"),
        needs=("response", "criterion"),
        knows=(*_REFERENCE, "criterion"),
    ),
}


@dataclass(frozen=True)
class GenRmConfig(RewardConfig):
    """Holds the settings of judges. conf/reward/genrm*.yaml document the values."""

    name: str = "genrm"
    timeout_s: float = 150.0
    form: str = "consistency"
    judges: dict[str, JudgeConfig] = field(default_factory=dict)
    route: str | None = None
    rubric: dict[str, float] = field(default_factory=dict)
    check: JudgeCheckConfig = field(default_factory=JudgeCheckConfig)


def check(config: GenRmConfig) -> None:
    """Raises ValueError with all invalid settings and their fixes."""
    problems = []
    if config.form not in FORMS:
        problems.append(f"reward.form={config.form}: use {', '.join(FORMS)}.")
    if not config.judges:
        problems.append("reward.judges={} names no judge. Use reward.judges.main.model=<a Hugging Face folder>.")
    if len(config.judges) > 1 and config.route is None:
        problems.append(
            f"reward.judges names {', '.join(config.judges)}: with several judges, reward.route must name the data "
            "column that chooses a row's judge."
        )
    if config.form == "rubric" and not any(weight > 0 for weight in config.rubric.values()):
        problems.append(
            f"reward.rubric={config.rubric} has no criterion with a weight above 0. Write for example "
            "'reward.rubric={The answer names its source: 1.0}'."
        )
    if config.form != "rubric" and config.rubric:
        problems.append(
            f"reward.rubric with reward.form={config.form}, which does not read it. Use reward.form=rubric."
        )
    for criterion, weight in config.rubric.items():
        if not math.isfinite(weight) or weight == 0:
            problems.append(f"reward.rubric: {criterion!r} has the weight {weight}. Use a number other than 0.")
    if not 0 <= config.check.min <= 1:
        problems.append(f"reward.check.min={config.check.min}: a share of right verdicts, from 0 to 1.")
    for name, judge in config.judges.items():
        problems += _judge_problems(name, judge, config)
    if problems:
        raise ValueError("\n".join(problems))


def _judge_problems(name: str, judge: JudgeConfig, config: GenRmConfig) -> list[str]:
    key, problems = f"reward.judges.{name}", []
    if not judge.model:
        problems.append(
            f"{key}.model is not set: name a Hugging Face folder, or the server's model if {key}.url is set."
        )
    if judge.url is not None and not judge.url.startswith(("http://", "https://")):
        problems.append(f"{key}.url={judge.url}: write a URL such as http://127.0.0.1:8000/v1.")
    if judge.url is None and judge.token_file is not None:
        problems.append(
            f"{key}.token_file={judge.token_file} without {key}.url: only a server at a URL needs it. Drop it."
        )
    for setting, least in (("count", 1), ("votes", 1), ("max_new_tokens", 1), ("max_response_chars", 1)):
        if (value := getattr(judge, setting)) < least:
            problems.append(f"{key}.{setting}={value}: must be at least {least}.")
    if not judge.temperature >= 0 or not math.isfinite(judge.temperature):
        problems.append(f"{key}.temperature={judge.temperature}: must be at least 0 (greedy).")
    if judge.votes > 1 and judge.temperature == 0:
        problems.append(
            f"{key}.votes={judge.votes} with {key}.temperature=0: greedy votes are all equal. Set {key}.temperature, "
            "e.g. 0.7."
        )
    if not judge.timeout_s > 0:
        problems.append(f"{key}.timeout_s={judge.timeout_s}: must be more than 0 seconds.")
    elif judge.timeout_s >= config.timeout_s:
        problems.append(
            f"reward.timeout_s={config.timeout_s:g} is not longer than {key}.timeout_s={judge.timeout_s:g}, so the "
            f"reward ends before the judge answers. Use reward.timeout_s={math.ceil(judge.timeout_s) + 30} or more."
        )
    return problems


def judges(config: GenRmConfig) -> JudgePlan:
    """Returns the judges. A judge without a template or parser uses the form's template or parser."""
    form = FORMS[config.form]
    return JudgePlan(
        judges={
            name: JudgeSetup(
                settings=judge,
                prompt=Path(judge.prompt).expanduser() if judge.prompt is not None else _TEMPLATES / form.template,
                parse=judge.parse if judge.parse is not None else form.parse,
                needs=form.needs,
                knows=form.knows,
            )
            for name, judge in config.judges.items()
        },
        check=config.check,
    )


def check_row(row: Mapping[str, Any], config: GenRmConfig) -> None:
    """Raises ValueError if the row names no judge or an unknown judge."""
    if config.route is not None:
        judge_of(row, config)


def judge_of(row: Mapping[str, Any], config: GenRmConfig) -> str:
    """Returns the name of a row's judge: the only judge, or the value of the column ``config.route``."""
    if config.route is None:
        (only,) = config.judges
        return only
    if config.route not in row:
        raise ValueError(f"no key {config.route!r}, which reward.route names; its keys are {', '.join(sorted(row))}.")
    name = row[config.route]
    if not isinstance(name, str) or name not in config.judges:
        raise ValueError(
            f"{config.route}={name!r} is none of the judges: {', '.join(config.judges)}. Add "
            f"reward.judges.{name}.model=<a Hugging Face folder>, or correct the row."
        )
    return name


async def score(given: RewardInput, config: GenRmConfig) -> RewardOutput:
    """Returns the reward of the form. It is None if a required verdict is None."""
    assert isinstance(given, JudgedInput), "a run passes a JudgedInput to a reward with judges"
    judge = judge_of(given.row, config)
    variables = {
        "question": _question(given),
        "reference": given.answer,
        "response": given.response.rpartition(_THOUGHT)[2].strip(),
    }
    if config.form == "pairwise":
        return await _pairwise(given, judge, variables)
    if config.form == "rubric":
        return await _rubric(given, judge, variables, config)
    if config.form == "deepeyes":
        return await _deepeyes(given, judge, variables)
    return _output([await given.judges.ask(judge, variables)], lambda values: values[0])


async def _pairwise(given: JudgedInput, judge: str, variables: Mapping[str, str]) -> RewardOutput:
    """Returns 1 if the response is better than the reference in both orders, and 0.5 if the orders disagree."""
    pair = (variables["response"], variables["reference"])
    verdicts = await asyncio.gather(
        *(
            given.judges.ask(judge, {"question": variables["question"], "first": first, "second": second})
            for first, second in (pair, pair[::-1])
        )
    )
    return _output(verdicts, lambda values: (values[0] + 1.0 - values[1]) / 2)


async def _rubric(given: JudgedInput, judge: str, variables: Mapping[str, str], config: GenRmConfig) -> RewardOutput:
    """Returns the weighted share of the criteria that are met, at least 0. Negative weights are for faults."""
    weights = config.rubric
    verdicts = await asyncio.gather(
        *(given.judges.ask(judge, {**variables, "criterion": criterion}) for criterion in weights)
    )
    whole = sum(weight for weight in weights.values() if weight > 0)
    return _output(
        verdicts,
        lambda values: max(0.0, sum(w * value for w, value in zip(weights.values(), values, strict=True)) / whole),
    )


async def _deepeyes(given: JudgedInput, judge: str, variables: Mapping[str, str]) -> RewardOutput:
    """Returns 0.8 × right + 0.2 × form (0, or -1 if malformed), + 1.2 if the answer is right and a tool was used."""
    texts = given.turns or [given.response]
    answer = variables["response"].rpartition("<answer>")[2].partition("</answer>")[0].strip()
    whole = "".join(texts)
    malformed = (
        any(whole.count(f"<{tag}>") != whole.count(f"</{tag}>") for tag in ("think", "tool_call"))
        or variables["response"].count("<answer>") != variables["response"].count("</answer>")
        or len(answer) >= _ANSWER_CHARS
    )
    if len(answer) >= _ANSWER_CHARS:
        verdicts = [Verdict(judge=judge, value=0.0, text="")]
    else:
        verdicts = [await given.judges.ask(judge, {**variables, "response": answer})]
    form, tool = (-1.0 if malformed else 0.0), float(len(given.turns) > 1)
    made = _output(verdicts, lambda values: values[0])
    if made.reward is None:
        return made
    right = made.reward
    return RewardOutput(
        reward=_RIGHT * right + _FORM * form + _WITH_TOOL * tool * float(right > 0.5),
        exact=made.exact,
        parts={**(made.parts or {}), "form": form, "tool": tool},
        answer=answer,
        why=made.why,
    )


def _output(verdicts: list[Verdict], combined: Any) -> RewardOutput:
    """Returns the output that ``combined`` computes from the values of verdicts.

    The reward is None if a value is missing.
    """
    why = "; ".join(verdict.description for verdict in verdicts)
    missing = next((verdict for verdict in verdicts if verdict.value is None), None)
    if missing is not None:
        return RewardOutput(reward=None, reason=missing.reason, why=why, cause=missing.cause)
    value = float(combined([verdict.value for verdict in verdicts]))
    return RewardOutput(reward=value, exact=value == 1.0, parts={"verdict": value}, why=why)


def _question(given: JudgedInput) -> str:
    """Returns the row's question: its text, or several messages with their roles."""
    prompt = given.row.get("prompt", "")
    if isinstance(prompt, str):
        return prompt
    said = [(message["role"], _text(message.get("content") or "")) for message in prompt]
    return said[0][1] if len(said) == 1 else "\n\n".join(f"{role}: {text}" for role, text in said)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", f"[{part.get('type', 'item')}]")) for part in content)


SPEC = RewardSpec(
    name="genrm",
    shadow="final_answer",
    summary="verdicts of judges: consistency with a reference, deepeyes, pairwise, rubric",
    config=GenRmConfig,
    score=score,
    check=check,
    check_row=check_row,
    judges=judges,
)
