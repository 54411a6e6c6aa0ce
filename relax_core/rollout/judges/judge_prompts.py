"""Renders the prompts of judges from jinja templates, and parses the verdicts in their answers.

The values of variables are data and are never rendered as templates. A verdict is a complete number or word, not a
digit inside a longer number or word.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from relax_core.contracts.judge import JudgeSetup

if TYPE_CHECKING:
    import jinja2


CUT_MARK = "\n[… {left} characters are left out here …]\n"
_TRIED = "a tried value of {name}"
# Control tokens in the chat templates of known model families.
_MARKUP = re.compile(
    r"<\|[^<>|\n]{1,64}\|>|<｜[^<>｜\n]{1,64}｜>|</?s>|\[/?INST\]|<</?SYS>>|</?(?:start|end)_of_turn>|</?think>|"
    r"</?tool_(?:call|response)>|\[/?(?:SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]"
)


class JudgePrompt:
    """Holds the prompt template of one judge.

    Raises ValueError with file and line if the file is not a template, reads an unknown variable, does not write a
    variable of ``setup.needs``, or fails.
    """

    def __init__(self, setup: JudgeSetup) -> None:
        self._file = setup.prompt
        self._knows = setup.knows
        self._most = setup.settings.max_response_chars
        self._template = _compiled(self._file)
        self._check(setup.needs)

    def text(self, variables: Mapping[str, str], *, shown: Callable[[str], str] = str) -> str:
        """Returns the rendered prompt; each value is first cut and then converted by ``shown``.

        Raises ValueError with file and line if the template fails.
        """
        assert set(variables) == set(self._knows), "a reward gives the variables that its SPEC names"
        return self._rendered({name: shown(cut(value, self._most)) for name, value in variables.items()})

    def _rendered(self, values: Mapping[str, str]) -> str:
        try:
            return self._template.render(**values)
        except Exception as error:  # a template is the user's code and may raise any error
            raise ValueError(f"{self._where(error)}: {type(error).__name__}: {error}.") from error

    def fixed_text(self) -> str:
        """Returns the prompt with one word per variable. It is the shortest prompt of the template."""
        return self.text(dict.fromkeys(self._knows, "x"))

    def _check(self, needs: Sequence[str]) -> None:
        from jinja2 import meta, nodes

        tree = self._template.environment.parse(self._file.read_text(encoding="utf-8"))
        unknown = meta.find_undeclared_variables(tree) - {*self._knows, *self._template.environment.globals}
        for node in tree.find_all(nodes.Name):
            if node.name in unknown:
                raise ValueError(
                    f"{self._file}, line {node.lineno}: no variable {node.name!r} exists. "
                    f"The variables are: {', '.join(self._knows)}."
                )
        text = self._rendered({name: _TRIED.format(name=name) for name in self._knows})
        for name in needs:
            if _TRIED.format(name=name) not in text:
                used = [node.lineno for node in tree.find_all(nodes.Name) if node.name == name]
                raise ValueError(
                    f"{self._file}, line {used[0] if used else 1}: the template does not write {name}, so the judge "
                    f"would not get it. Write {{{{ {name} }}}} where it belongs."
                )

    def _where(self, error: BaseException) -> str:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.lineno for frame in reversed(frames) if frame.filename == str(self._file)), 1)
        return f"{self._file}, line {line}"


def cut(text: str, most: int) -> str:
    """Returns a text; if it is longer than ``most`` characters, a mark replaces the middle."""
    if len(text) <= most:
        return text
    behind = most // 2
    return text[: most - behind] + CUT_MARK.format(left=len(text) - most) + (text[-behind:] if behind else "")


def without_markup(text: str) -> str:
    """Returns a text with a zero-width space in each control token of chat templates, which breaks these tokens.

    This is for servers with an unknown tokenizer. Engines of the run receive token ids, in which no text becomes a
    special token.
    """
    return _MARKUP.sub(lambda found: f"{found[0][0]}\u200b{found[0][1:]}", text)


@cache
def _environment() -> jinja2.Environment:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)


def _compiled(file: Path) -> jinja2.Template:
    from jinja2 import Template, TemplateSyntaxError

    environment = _environment()
    try:
        code = environment.compile(file.read_text(encoding="utf-8"), name=file.name, filename=str(file))
    except TemplateSyntaxError as error:
        raise ValueError(f"{file}, line {error.lineno}: the template does not parse: {error.message}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: the template cannot be read: {error}. Name a text file.") from error
    return Template.from_code(environment, code, environment.make_globals(None))


Parser = Callable[[str, bool], float | None]  # a judge's text, and whether it was cut → the verdict, or None

# The verdict of each word. A, B and tie say which of two answers is better.
WORDS = {
    **dict.fromkeys(("yes", "true", "right", "correct", "pass", "a"), 1.0),
    **dict.fromkeys(("no", "false", "wrong", "incorrect", "fail", "b"), 0.0),
    "tie": 0.5,
}
# The forms of ``parse`` that `verdict_parser` accepts, with their meaning.
DESCRIPTIONS = {
    "number LOW..HIGH": "the judge's whole text is a number in this range, which becomes 0 to 1",
    "'(?P<verdict>…)'": f"a regular expression; its group verdict is a number or one of {', '.join(WORDS)}",
}
_THOUGHT = "</think>"
_RANGE = re.compile(r"number\s+(-?[0-9]+(?:\.[0-9]+)?)\.\.(-?[0-9]+(?:\.[0-9]+)?)")
_NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?")
_BEFORE = re.compile(r"(?:[\w.+/-]|\d[,:])\Z")  # after such text, a match is part of a longer number or word
_BEHIND = re.compile(r"^(?:[\w%]|[.,/:-]\w)")


def verdict_parser(parse: str) -> Parser:
    """Returns the parser that ``parse`` describes: "number LOW..HIGH" or a regular expression.

    With "number", the judge's whole text must be a number in the range; the range is scaled to 0 to 1. With a regular
    expression, the last match is used; its group "verdict" must be a number or a word of `WORDS`. Text before </think>
    is ignored. A verdict at the end of a cut text is not read, because the verdict may be incomplete.

    Raises ValueError for any other description.
    """
    if parse.startswith("number"):
        return _number_parser(parse)
    try:
        pattern = re.compile(parse)
    except re.error as error:
        raise ValueError(f"{parse!r} is not a regular expression: {error}. See Python's module re.") from error
    if "verdict" not in pattern.groupindex:
        raise ValueError(
            f"{parse!r} has no group of the name verdict. Write such as '(?P<verdict>yes|no)', or 'number 0..10'."
        )
    return lambda text, is_cut: _by_pattern(pattern, text, is_cut=is_cut)


def _number_parser(parse: str) -> Parser:
    found = _RANGE.fullmatch(parse.strip())
    if found is None or float(found[1]) >= float(found[2]):
        raise ValueError(f"{parse!r} is not a range of numbers. Write such as 'number 0..10'.")
    low, high = float(found[1]), float(found[2])

    def read(text: str, is_cut: bool) -> float | None:
        said = _conclusion(text)
        if said is None or is_cut or not _NUMBER.fullmatch(said) or not low <= float(said) <= high:
            return None
        return (float(said) - low) / (high - low)

    return read


def _by_pattern(pattern: re.Pattern[str], text: str, *, is_cut: bool) -> float | None:
    said = _conclusion(text)
    matches = list(pattern.finditer(said)) if said is not None else []
    if said is None or not matches or matches[-1]["verdict"] is None:
        return None
    start, end = matches[-1].span("verdict")
    if _BEFORE.search(said[:start]) or _BEHIND.search(said[end:]) or (is_cut and not said[end:].strip()):
        return None
    return _value(said[start:end])


def _conclusion(text: str) -> str | None:
    """Returns the text after the judge's thinking, or None if the thinking has not ended."""
    said = text.rpartition(_THOUGHT)[2].strip()
    return None if "<think>" in said else said


def _value(said: str) -> float | None:
    word = said.strip().lower()
    if _NUMBER.fullmatch(word):
        return float(word) if math.isfinite(float(word)) else None
    return WORDS.get(word)
