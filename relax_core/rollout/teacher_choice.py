"""Chooses the teacher of a prompt from its data row."""

from __future__ import annotations

from collections.abc import Callable, Collection

from relax_core.contracts.algorithm import TeacherRequirements
from relax_core.contracts.data import BadRow, DataRow

TeacherOf = Callable[[DataRow, str], str]  # a data row and its name in errors → the teacher's name


def teacher_chooser(teachers: TeacherRequirements) -> TeacherOf:
    """Returns a function that gives the name of a data row's teacher.

    That is the only teacher if no column is set, and otherwise the column's value. The function raises `BadRow` for a
    row that names none of the teachers.
    """
    if not teachers.key:
        (only,) = teachers.models
        return lambda row, what: only
    return lambda row, what: named_teacher(row, teachers.key, known=teachers.models, what=what)


def named_teacher(row: DataRow, key: str, *, known: Collection[str], what: str) -> str:
    """Returns the teacher that the data row names; raises `BadRow` with the row, its value and the known teachers."""
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
