"""The worker of the teacher role, which writes the teachers' log-probs of the sampled tokens.

One process serves all teachers. With ``served_by=forward`` it holds their models. With ``served_by=engine`` each
teacher has its own engine, and this process only sends requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from relax_core.contracts import columns as c
from relax_core.contracts.bus import LeasedGroup
from relax_core.contracts.tree import TokenTree
from relax_core.engines.engine_process import EngineLaunch
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.registry import find_algorithm
from relax_core.roles.annotators.column_worker import ColumnWorker, GroupColumns
from relax_core.roles.annotators.teacher_scorers import (
    EngineTeacher,
    ForwardTeacher,
    TeacherScorer,
    TeacherScores,
)
from relax_core.roles.engine.engine_directory import EngineDirectory
from relax_core.roles.engine.engine_media import engine_media
from relax_core.roles.engine.engine_owner import EngineOwner
from relax_core.roles.process.role_context import TEACHER_ENGINE, RunContext, worker_name


class TeacherWorker(ColumnWorker):
    """Writes the teacher's columns of every group, each with the teacher that the group names."""

    task = "teacher"
    inputs: tuple[str, ...] = (*c.FORWARD_COLUMNS, c.TEACHER)
    _teachers: Mapping[str, TeacherScorer]
    _owners: Mapping[str, str] = {}  # teacher → the owner of its engine, if it has one

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        assert rank == 0, "one process serves all teachers"
        if context.config.rollout.truncates:
            self.inputs = (*self.inputs, c.KEPT_TOKENS)
        super().__init__(name, context)

    def prepare(self) -> None:
        """Builds the teachers' models or finds their engines."""
        context, algo = self.context, self.context.config.algo
        requirements = find_algorithm(algo.name).requirements(algo).teacher
        assert requirements is not None, "this role runs only for algorithms with teachers"
        folders = context.teacher_folders
        if requirements.served_by == "engine":
            directory = EngineDirectory(context, role=TEACHER_ENGINE, model_folders=list(folders.values()))
            media = engine_media(context, role=TEACHER_ENGINE)
            self._teachers = {
                name: EngineTeacher(context, directory, number, top_k=requirements.top_k, media=media)
                for number, name in enumerate(folders)
            }
            self._owners = {name: worker_name(TEACHER_ENGINE, number) for number, name in enumerate(folders)}
        else:
            self._teachers = {
                name: ForwardTeacher(context, folder, top_k=requirements.top_k) for name, folder in folders.items()
            }

    def columns_of(self, leased: Sequence[LeasedGroup]) -> GroupColumns:
        """Returns the teacher's columns of each group."""
        of_teachers: dict[str, list[LeasedGroup]] = defaultdict(list)
        for row in leased:
            of_teachers[msgspec.msgpack.decode(row.columns[c.TEACHER], type=str)].append(row)
        columns: GroupColumns = {}
        for name, its_rows in of_teachers.items():
            groups = [c.decode_tree(row) for row in its_rows]
            for group, scores in zip(groups, self._score(name, groups), strict=True):
                columns[group.group_uid] = teacher_columns(scores)
        return columns

    def _score(self, name: str, groups: Sequence[TokenTree]) -> list[TeacherScores]:
        teacher = self._teachers[name]
        if name not in self._owners:
            return teacher.score(groups)
        with self.waiting(f"the scores of teacher {name} for {len(groups)} groups", on=self._owners[name]):
            return teacher.score(groups)


def teacher_columns(scores: TeacherScores) -> dict[str, bytes]:
    """Returns the columns of one group."""
    columns = {c.TEACHER_LOGPROBS: c.encode_column(c.TEACHER_LOGPROBS, scores.logprobs)}
    for name, values in ((c.TEACHER_TOP_IDS, scores.top_ids), (c.TEACHER_TOP_LOGPROBS, scores.top_logprobs)):
        if values is not None:
            columns[name] = c.encode_column(name, values)
    return columns


class TeacherEngineOwner(EngineOwner):
    """Owns the engine of teacher ``rank``, in the order of the teachers' names in the configuration.

    The engine serves the teacher's own weights from its start, and no other weights are ever sent to it.
    """

    def _engine_launch(self, port: int) -> EngineLaunch:
        folder = list(self.context.teacher_folders.values())[self._rank]
        return replace(super()._engine_launch(port), model_folder=folder, load_weights=True)

    def _first_port(self) -> int:
        return 0

    def _reconcile(self, client: EngineClient) -> None:
        self.set_state("running", self._url)
