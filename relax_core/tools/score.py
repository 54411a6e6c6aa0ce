"""Scores the answers in a file without a run: ``python -m relax_core.tools.score reward=dapo file=answers.jsonl``.

Each line is a JSON object with ``response`` (or a list ``responses``) and ``answer`` (or ``label``). A reward may read
further columns. ``answers.jsonl`` of `relax eval` has this form. Settings are written as for a run:
``reward.strict=true``, ``reward.by=COLUMN``, ``'reward.parts=[…]'``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relax_core.config.errors import ConfigError
from relax_core.config.options import conf_folder
from relax_core.config.plugin_types import plugin_config
from relax_core.config.reward_choice import RewardChoice
from relax_core.contracts.plugin_results import WrongResult
from relax_core.contracts.reward import AUTO, REPORT, RewardConfig, RewardInput, RewardOutput, RewardSpec
from relax_core.contracts.untrusted_files import shown_json
from relax_core.data.row_formats import label_text, written_number
from relax_core.observe.panel import ShownConsole
from relax_core.observe.standard_streams import unread_streams
from relax_core.registry import find_reward
from relax_core.rollout.rewards.label_check import LabelCheck
from relax_core.rollout.rewards.reward_pool import RewardPool

ALL_SCORED, SOME_NOT, WRONG_INPUT = 0, 1, 2
_SHOWN_ROWS = 20


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Holds one line of the file: its number from 1, the data row, and the responses."""

    line: int
    row: Mapping[str, Any]
    responses: Sequence[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the scores. Returns 0 if all answers have a reward, 1 if a reward is missing, and 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="python -m relax_core.tools.score", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="+", help="reward=NAME file=FILE.jsonl, and settings such as reward.strict=true")
    parser.add_argument("--json", action="store_true", help="print one JSON object per answer, not a table")
    parser.add_argument("--workers", type=int, default=1, help="worker processes of isolated rewards")
    given = parser.parse_args(arguments)
    try:
        spec, config, file = _settings(given.words)
        rows = list(_rows(file))
        choice = RewardChoice(spec, config)
        labels = LabelCheck(choice)
        for file_row in rows:
            choice.check_row(file_row.row, f"{file}, line {file_row.line}")
            labels.add(file_row.row, f"{file}, line {file_row.line}")
        found = list(zip(rows, asyncio.run(_scored(spec, config, rows, workers=given.workers)), strict=True))
    except (ConfigError, ValueError, OSError, WrongResult, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_INPUT
    for note in labels.describe():
        print(note, file=sys.stderr)
    lines = [_line(row, number, output) for row, outputs in found for number, output in enumerate(outputs)]
    if given.json:
        for line in lines:
            print(shown_json(json.dumps(line, ensure_ascii=False)))
    else:
        _print_table(ShownConsole(), lines)
    return ALL_SCORED if all(line["reward"] is not None for line in lines) else SOME_NOT


def _settings(words: Sequence[str]) -> tuple[RewardSpec, Any, Path]:
    """Returns the reward, its settings and the file. Raises ValueError and `ConfigError` for invalid arguments."""
    pairs = dict(word.partition("=")[::2] for word in words if "=" in word)
    if (wrong := [word for word in words if "=" not in word]) or "file" not in pairs:
        what = wrong[0] if wrong else "file"
        raise ValueError(f"{what}: write reward=NAME file=FILE.jsonl and settings as key=value.")
    file = Path(pairs.pop("file"))
    name = pairs.pop("reward", None) or pairs.pop("reward.name", None)
    if name is None:
        raise ValueError(
            "reward: name one, such as reward=math. With reward.by=COLUMN it scores rows without a value in COLUMN."
        )
    if unknown_keys := [key for key in pairs if not key.startswith("reward.")]:
        raise ValueError(f"{unknown_keys[0]}: only reward=NAME, reward.KEY=VALUE and file=FILE.jsonl are read here.")
    values = {key.removeprefix("reward."): yaml.safe_load(value) for key, value in pairs.items()}
    name = str(Path(name).absolute()) if name.endswith(".py") else name
    preset = conf_folder() / "reward" / f"{name}.yaml"
    if preset.is_file():  # a preset has the default settings, and may name another reward
        values = yaml.safe_load(preset.read_text(encoding="utf-8")) | values
        name = values["name"]
    spec = find_reward(name)
    config: RewardConfig = plugin_config("reward", name, values, section="reward")
    spec.check(config)
    return spec, config, file


def _rows(file: Path) -> Iterator[_Row]:
    """Yields the lines of a file. Raises ValueError with file and line number for a line that cannot be scored."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not a JSON object: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: not a JSON object.")
        responses = row.pop("responses", None) or [row.pop("response", None)]
        key = "label" if "label" in row else "answer"
        answer = row.pop("label", row.get("answer"))
        if not all(isinstance(response, str) for response in responses) or not isinstance(answer, str | int | float):
            raise ValueError(f"{where}: it needs response (or responses) and answer (or label), as text.")
        try:
            text = label_text(written_number(line, key) if isinstance(answer, float) else answer, may_be_empty=True)
        except ValueError as error:
            raise ValueError(f"{where}: {key}={answer} {error}") from error
        yield _Row(line=number, row=row | {"answer": text}, responses=responses)


async def _scored(spec: RewardSpec, config: Any, rows: Sequence[_Row], *, workers: int) -> list[list[RewardOutput]]:
    """Returns the outputs of each row's responses. Continues after failures.

    A shadow reward scores only if reward.shadow names it; ``auto`` means no shadow reward here.
    """
    shadow = None if config.shadow == AUTO else config.shadow
    patient = replace(config, max_failed=1.0, shadow=shadow, on_hack=REPORT)
    with RewardPool(spec, patient, workers=workers, concurrency=32) as pool:
        return list(
            await asyncio.gather(
                *(
                    pool.score(
                        [
                            RewardInput(response=text, stopped=True, answer=file_row.row["answer"], row=file_row.row)
                            for text in file_row.responses
                        ]
                    )
                    for file_row in rows
                )
            )
        )


def _line(row: _Row, number: int, output: RewardOutput) -> dict[str, Any]:
    return {
        "line": row.line,
        "number": number,
        "reward": output.reward,
        "exact": output.exact,
        "parts": dict(output.parts or {}),
        "why": output.why,
        "reason": output.reason,
    }


def _print_table(console: Console, lines: Sequence[Mapping[str, Any]]) -> None:
    """Prints the first answers, the mean of the rewards, and the number of answers without a reward."""
    table = Table(show_edge=False)
    for heading in ("line", "reward", "parts", "why"):
        table.add_column(heading, justify="right" if heading in ("line", "reward") else "left")
    for line in lines[:_SHOWN_ROWS]:
        reward = "none" if line["reward"] is None else f"{line['reward']:.4g}"
        parts = ", ".join(f"{name} {value:.4g}" for name, value in line["parts"].items())
        why = line["why"] if line["reward"] is not None else line["reason"]
        table.add_row(str(line["line"]), reward, parts, Text(why))
    console.print(table)
    if len(lines) > _SHOWN_ROWS:
        console.print(f"… and {len(lines) - _SHOWN_ROWS} more; --json prints all of them.", highlight=False)
    known = [line["reward"] for line in lines if line["reward"] is not None]
    exact = sum(line["exact"] for line in lines)
    mean = f"mean reward {fmean(known):.4f}, {exact / len(lines):.1%} exact" if known else ""
    missing = len(lines) - len(known)
    counts = [f"{len(lines)} answers", mean, f"{missing} without a reward" if missing else ""]
    console.print(", ".join(line for line in counts if line), highlight=False)


if __name__ == "__main__":
    with unread_streams():
        sys.exit(main())
