"""The contract of a judge, a model that returns a verdict on an answer. A reward calls judges through its input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

from relax_core.contracts.reward import RewardInput


@dataclass(frozen=True)
class JudgeConfig:
    """Holds the settings of one judge, ``reward.judges.NAME``.

    Without ``url`` the run starts ``count`` engines of the kind ``engine``, and ``model`` is a Hugging Face folder or a
    built-in model. With ``url`` the judge is an OpenAI-compatible server, and ``model`` is the model's name on this
    server; ``url`` ends in /v1, and the file ``token_file`` contains the server's key.

    ``prompt`` is a file with a Jinja template, and ``parse`` says how to parse the verdict; None means the value of the
    reward's `JudgeSetup`. The verdict is the mean of ``votes`` answers of the judge. ``timeout_s`` is the time limit in
    seconds for all votes of a verdict. Each text of a row or response is cut at ``max_response_chars`` characters.
    """

    model: str | None = None
    url: str | None = None
    token_file: str | None = None
    engine: str = "embedded"
    count: int = 1
    prompt: str | None = None
    parse: str | None = None
    votes: int = 1
    max_new_tokens: int = 64
    temperature: float = 0.0
    timeout_s: float = 60.0
    max_response_chars: int = 20000


@dataclass(frozen=True)
class JudgeCheckConfig:
    """Holds ``reward.check``, the test of judges on known verdicts before the first prompt.

    ``path`` is a file of rows with question, answer and verdict. The run ends if the share of correct verdicts is below
    ``min``.
    """

    path: str | None = None
    min: float = 0.8


@dataclass(frozen=True, kw_only=True)
class JudgeSetup:
    """Describes how a reward calls a judge.

    ``prompt`` is the template's file. ``knows`` lists the variables that the reward passes to the template. ``needs``
    lists the variables that the template must use. ``parse`` is "number LOW..HIGH", or a regular expression with the
    group "verdict".
    """

    settings: JudgeConfig
    prompt: Path
    parse: str
    needs: tuple[str, ...]
    knows: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class JudgePlan:
    """Holds the judges that a reward calls, by name, and their test before the first prompt."""

    judges: Mapping[str, JudgeSetup]
    check: JudgeCheckConfig = field(default_factory=JudgeCheckConfig)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Holds a judge's verdict on one answer.

    ``value`` is the number in the judge's output, scaled to 0..1 if the parser has a range. For words such as yes and
    no, ``value`` is 1 or 0. ``value`` is None if there is no verdict. ``reason`` is then the reason as a sentence, and
    ``cause`` is the reason as one word. ``text`` is the judge's output; with several votes, the last output.
    """

    judge: str
    value: float | None
    text: str = ""
    reason: str = ""
    cause: str = ""

    @property
    def description(self) -> str:
        """Returns the verdict with the judge's name and text, for `RewardOutput.why`."""
        value = "no verdict" if self.value is None else f"{self.value:g}"
        return f"judge {self.judge}: {value}" + (f" ({' '.join(self.text.split())!r})" if self.text else "")


class Judges(Protocol):
    """Calls the judges of a run."""

    async def ask(self, judge: str, variables: Mapping[str, str]) -> Verdict:
        """Returns the verdict of the judge with this name; ``variables`` are the values for its template.

        If the judge is down or its output cannot be parsed, the verdict's value is None; no error is raised.
        """
        ...


class JudgedInput(RewardInput):
    """Holds the input of a reward that has ``judges`` in its SPEC.

    ``judges`` calls the judges. This attribute is not a field, so it is not sent to the worker process of another
    reward.
    """

    judges: Judges

    @classmethod
    def of(cls, given: RewardInput, judges: Judges) -> JudgedInput:
        """Returns the same input with ``judges``."""
        made = cls(**{struct_field.name: getattr(given, struct_field.name) for struct_field in fields(RewardInput)})
        object.__setattr__(made, "judges", judges)
        return made
