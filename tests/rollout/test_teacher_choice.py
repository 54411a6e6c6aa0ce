"""Tests the choice of the teacher: the data row names the teacher, and the group on the bus has this name."""

from __future__ import annotations

import msgspec
import pytest

from relax_core.contracts import columns as c
from relax_core.contracts.algorithm import TeacherRequirements
from relax_core.contracts.bus import Group
from relax_core.rollout.episodes.group_assembly import complete_group
from relax_core.rollout.rollout_loop import teacher_chooser
from tests.responses import response, scored

MODELS = {"math": "/m", "code": "/c"}


def test_the_only_teacher_needs_no_column() -> None:
    assert teacher_chooser(TeacherRequirements(models={"default": "/m"}))({"prompt": "?"}, "data row 3") == "default"


def test_the_column_chooses() -> None:
    choose = teacher_chooser(TeacherRequirements(models=MODELS, key="source"))
    assert [choose({"source": name}, "data row 3") for name in ("code", "math")] == ["code", "math"]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"source": "art"}, "data row 3: source='art' is not a teacher: math, code. Add algo.teachers.art="),
        ({"source": 7}, "data row 3: source=7 is not a teacher"),
        ({"prompt": "?"}, "data row 3: no key 'source', which algo.teacher_key names; its keys are prompt."),
    ],
)
def test_a_row_without_a_known_teacher_is_named(row: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        teacher_chooser(TeacherRequirements(models=MODELS, key="source"))(row, "data row 3")
    assert text in str(caught.value)


@pytest.mark.parametrize("teacher", ["math", None])
def test_the_name_travels_with_the_row(teacher: str | None) -> None:
    responses = [response([1, 2], versions=0, sample=sample) for sample in range(2)]
    row = complete_group(index=0, episodes=scored(responses, [1.0, 1.0]), teacher=teacher)
    assert isinstance(row, Group)
    found = row.columns.get(c.TEACHER)
    assert (None if found is None else msgspec.msgpack.decode(found)) == teacher
