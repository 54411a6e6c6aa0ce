"""Tests the file with a run's engine list: atomic writes, damage, and the configured engines if there is no file."""

from __future__ import annotations

from pathlib import Path

import pytest

import relax_core.weights.version_folder as version_folder
from relax_core.control.engine_set import EngineSet
from relax_core.weights.engine_members import ENGINES, MemberList, start_members


def test_the_list_is_what_was_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_folder, "READ_AGAIN_S", 0.0)
    members, engines = MemberList(tmp_path / "0", count=2), EngineSet(2)
    assert members.read() == members.at_start == start_members(2)
    engines.begin(tmp_path / "0")
    assert members.read() == members.at_start, "a run that never changes its engines looks like one without a list"
    (added,) = engines.reserve(1)
    engines.add(added)
    assert members.read().started == [0, 1] and members.read().in_state("joining") == [added] == [2]
    engines.set_state(added, "leaving")
    assert members.read().started == [0, 1, 2] and members.read().in_state("serving") == [0, 1]
    file = tmp_path / "0" / ENGINES
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    assert members.read().started == [0, 1, 2], "the previous list stays valid"
    file.write_bytes(whole)
    engines.remove(added)
    assert members.read() == start_members(2)


def test_no_number_belongs_to_two_engines_of_a_run(tmp_path: Path) -> None:
    engines = EngineSet(1)
    engines.begin(tmp_path / "0")
    first, second, third = engines.reserve(3)
    for number in (first, second, third):
        engines.add(number)
    engines.set_state(first, "serving")
    engines.set_state(second, "moving")
    engines.remove(third, failure="it ended")
    engines.begin(tmp_path / "1")  # a new attempt: all services start again
    assert engines.added("joining") == [first], "it gets the weights of this attempt; a moving engine is removed"
    assert MemberList(tmp_path / "1", count=1).read().started == [0]
    assert engines.reserve(1) == [third + 1] and engines.failures == {third: "it ended"}
    assert EngineSet(1, added={first: ""}, used=7).reserve(2) == [8, 9], "a new controller continues the numbering"
    with pytest.raises(AssertionError):
        engines.remove(0)
