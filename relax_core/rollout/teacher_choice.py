"""Which teacher judges the responses to a prompt: the data says so."""

from __future__ import annotations

from collections.abc import Callable, Collection

from relax_core.contracts.algorithm import TeacherRequirements
from relax_core.contracts.data import BadRow, DataRow

TeacherOf = Callable[[DataRow, str], str]  # a row, and what to call it in an error


def teacher_chooser(teachers: TeacherRequirements) -> TeacherOf:
    """The name of a row's teacher: the only one where no column is set, else what stands in the column.

    It raises `BadRow` for a row that names none of the teachers.
    """
    if not teachers.key:
        (only,) = teachers.models
        return lambda row, what: only
    return lambda row, what: named_teacher(row, teachers.key, known=teachers.models, what=what)


def named_teacher(row: DataRow, key: str, *, known: Collection[str], what: str) -> str:
    """Raises `BadRow` that says which row, what stands there and what is known."""
    if key not in row:
        keys = ", ".join(sorted(row))
        text = f"{what}: no key {key!r}, which algo.teacher_key names; its keys are {keys}."
        raise BadRow.because("teacher", text)
    name = row[key]
    if not isinstance(name, str) or name not in known:
        raise BadRow.because(
            "teacher",
            f"{what}: {key}={name!r} is none of the teachers: {', '.join(known)}. Add algo.teachers.{name}=<a Hugging "
            "Face folder>, or correct the row.",
        )
    return name
