"""The contract of a judge: a model that returns a verdict on an answer; a reward calls it through its input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

from relax_core.contracts.reward import RewardInput


@dataclass(frozen=True)
class JudgeConfig:
    """Holds the settings of one judge, ``reward.judges.NAME``.

    ``model`` is a Hugging Face folder or a built-in model. With ``url`` it is the model's name on an OpenAI-compatible
    server; ``url`` ends in /v1, and the file ``token_file`` holds the server's key. Otherwise the run starts ``count``
    engines of the kind ``engine``.

    ``prompt`` is a file with a Jinja template, and ``parse`` says how the verdict is parsed; None takes the preset's
    value. The verdict is the mean of ``votes`` answers of the judge. ``timeout_s`` is the time limit in seconds of a
    verdict with all its votes. Each text of a row or response is cut at ``max_response_chars``.
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
    """Holds ``reward.check``: known verdicts on which judges are tested before the first prompt.

    ``path`` is a file of rows with question, answer and verdict. The run ends if the share of correct verdicts is below
    ``min``.
    """

    path: str | None = None
    min: float = 0.8


@dataclass(frozen=True, kw_only=True)
class JudgeSetup:
    """Describes how a reward calls a judge.

    ``prompt`` is the template's file. ``knows`` are the variables that the reward passes to the template, and ``needs``
    the variables that the template must use. ``parse`` is "number LOW..HIGH", or a regular expression with the group
    "verdict".
    """

    settings: JudgeConfig
    prompt: Path
    parse: str
    needs: tuple[str, ...]
    knows: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class JudgePlan:
    """Holds the judges that a reward calls, by name, and the check before the first prompt."""

    judges: Mapping[str, JudgeSetup]
    check: JudgeCheckConfig = field(default_factory=JudgeCheckConfig)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Holds a judge's verdict on one answer.

    ``value`` is the number in the text; it is scaled to 0..1 if the parser has a range, and 1 or 0 for words such as
    yes and no. It is None if there is no verdict; ``reason`` says why, and ``cause`` in one word. ``text`` is the
    judge's output, for several votes the last output.
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

        It does not raise if the judge is down or its output cannot be parsed; the verdict's value is None then.
        """
        ...


class JudgedInput(RewardInput):
    """Holds the input of a reward whose SPEC has ``judges``.

    ``judges`` calls the judges. It is not a field, so a worker process of another reward gets the input without it.
    """

    judges: Judges

    @classmethod
    def of(cls, given: RewardInput, judges: Judges) -> JudgedInput:
        """Returns the same input with ``judges``."""
        made = cls(**{struct_field.name: getattr(given, struct_field.name) for struct_field in fields(RewardInput)})
        object.__setattr__(made, "judges", judges)
        return made
