"""Reads the vectors in tests/rewards/vectors/. The original scorers computed these vectors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "vectors"


@dataclass(frozen=True, kw_only=True)
class Vector:
    """Holds an answer with the original scorer's value. Where Relax differs, ``ours`` is set, with the reason."""

    reward: str
    response: str
    answer: str
    row: Mapping[str, Any]
    settings: Mapping[str, Any]
    source: float | str  # a value, "raises TYPE" or "hangs"
    ours: float | str | None
    departs: str

    @property
    def expected(self) -> float | str | None:
        return self.ours if self.departs else self.source


def vectors(reward: str) -> list[Vector]:
    found = json.loads((FOLDER / f"{reward}.json").read_text(encoding="utf-8"))
    return [
        Vector(
            reward=reward,
            response=_text(case["response"]),
            answer=_text(case["answer"]),
            row=case.get("row", {}),
            settings=case.get("settings", {}),
            source=case["source"],
            ours=case.get("ours"),
            departs=case.get("departs", ""),
        )
        for case in found
    ]


def _text(written: str | Sequence[Any]) -> str:
    """Joins the parts of a long text. A part [text, count] is a repeated text."""
    return written if isinstance(written, str) else "".join(p if isinstance(p, str) else p[0] * p[1] for p in written)
