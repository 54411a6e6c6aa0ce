"""The contract of a judge: a model that gives a verdict on an answer, and that a reward asks through its input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

from relax_core.contracts.reward import RewardInput


@dataclass(frozen=True)
class JudgeConfig:
    """Holds the settings of one judge, ``reward.judges.NAME``.

    ``model`` is a Hugging Face folder or a built-in model. With ``url`` it is the name that an OpenAI-shaped server has
    for its model; ``url`` then ends in /v1, and the file ``token_file`` holds the server's key. Otherwise the run
    starts ``count`` engines of the kind ``engine``.

    ``prompt`` is a file with a jinja template, and ``parse`` says how a verdict is read; None takes the preset's.
    ``votes`` is the number of answers of the judge whose mean is the verdict. ``timeout_s`` is the time in seconds that
    a verdict may take with all its votes. Each text of a row or response is cut at ``max_response_chars``.
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
    """Holds ``reward.check``: verdicts that are known, with which judges are tried before the first prompt.

    ``path`` is a file of rows with question, answer and verdict. The run ends if the share of right verdicts is below
    ``min``.
    """

    path: str | None = None
    min: float = 0.8


@dataclass(frozen=True, kw_only=True)
class JudgeSetup:
    """Is a judge as a reward wants it asked.

    ``prompt`` is the template's file. ``knows`` are the variables that the reward gives to it, and ``needs`` those that
    it must write. ``parse`` is "number LOW..HIGH", or a regular expression with the group "verdict".
    """

    settings: JudgeConfig
    prompt: Path
    parse: str
    needs: tuple[str, ...]
    knows: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class JudgePlan:
    """Holds the judges that a reward asks, by name, and the check before the first prompt."""

    judges: Mapping[str, JudgeSetup]
    check: JudgeCheckConfig = field(default_factory=JudgeCheckConfig)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Is what a judge says of one question.

    ``value`` is a number: as it stands in the text, from 0 to 1 if the parser has a range, and 1 or 0 for words such as
    yes and no. It is None if there is none; ``reason`` says why, and ``cause`` in one word. ``text`` is what the judge
    wrote, of several votes the last one.
    """

    judge: str
    value: float | None
    text: str = ""
    reason: str = ""
    cause: str = ""

    @property
    def words(self) -> str:
        """Returns the verdict with the judge's name and text, for `RewardOutput.why`."""
        value = "no verdict" if self.value is None else f"{self.value:g}"
        return f"judge {self.judge}: {value}" + (f" ({' '.join(self.text.split())!r})" if self.text else "")


class Judges(Protocol):
    """Asks the judges of a run."""

    async def ask(self, judge: str, variables: Mapping[str, str]) -> Verdict:
        """Returns the verdict of the judge with this name on its template with these variables.

        It never raises for a judge that is down or writes nonsense; the verdict's value is None then.
        """
        ...


class JudgedInput(RewardInput):
    """Is the input of a reward whose SPEC has ``judges``.

    ``judges`` asks them. It is no field, so a worker process of another reward gets the input without it.
    """

    judges: Judges

    @classmethod
    def of(cls, given: RewardInput, judges: Judges) -> JudgedInput:
        """Returns the same input with ``judges``."""
        made = cls(**{one.name: getattr(given, one.name) for one in fields(RewardInput)})
        object.__setattr__(made, "judges", judges)
        return made
