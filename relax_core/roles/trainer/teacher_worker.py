"""Implements the teacher role, which writes the teachers' log-probs of the sampled tokens and of the top-k tokens.

One process computes for all teachers. With ``served_by=forward`` the teachers' models are in this process. With
``served_by=engine`` each teacher has a separate engine, and this process only sends requests.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import numpy as np

from relax_core.contracts import columns as c
from relax_core.contracts.bus import Group
from relax_core.contracts.engine import EngineUnreachable
from relax_core.contracts.media import Media
from relax_core.contracts.tree import TokenTree
from relax_core.engines.engine_process import EngineLaunch
from relax_core.engines.protocol.engine_client import EngineClient, TokenScores, TokensToScore
from relax_core.families.hf_config import language_values, read_hf_config
from relax_core.registry import find_algorithm
from relax_core.roles.engine_directory import EngineDirectory, EngineMedia, engine_media
from relax_core.roles.engine_owner import EngineOwner
from relax_core.roles.role_context import TEACHER_ENGINE, RunContext, worker_name
from relax_core.roles.trainer.build_backend import build_teacher
from relax_core.roles.trainer.column_worker import ColumnWorker

if TYPE_CHECKING:
    from relax_core.train.policy_backend import MegatronBackend


TOKENS_A_CALL = 16384  # most tokens in one call to an engine; with top_k = 16 the response has about 10 MB of JSON
KEPT_BYTES_A_CALL = 16 << 20  # most bytes of kept sets in one call; base64 adds a third
RETRY_S = 0.1


class TeacherScores(NamedTuple):
    """Holds a teacher's scores of a group's rows; rows that were not sampled have zeros.

    ``logprobs`` is float32 ``[rows]``. ``top_ids`` int32 ``[rows, top_k]`` are the teacher's most likely tokens, most
    likely first. ``top_logprobs`` float32 ``[rows, top_k]`` are the log-probs of these tokens. The two arrays are None
    if top_k is 0. For a kept set with fewer than top_k tokens, the last ids are -1 and their log-probs
    `kept_tokens.OUTSIDE`.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None


class TeacherScorer(Protocol):
    """Defines the interface of one teacher.

    The teacher's log-probs are computed like the student's log-probs: from softmax(logits / rollout.temperature) over
    the kept sets of the sampled tokens, without the banned tokens. So a teacher with the student's weights has the same
    log-probs as the student.
    """

    def score(self, groups: Sequence[TokenTree]) -> list[TeacherScores]:
        """Returns the scores of each group."""


class ForwardTeacher:
    """Computes the scores with a Megatron model in this process, without gradient."""

    def __init__(self, context: RunContext, folder: Path, *, top_k: int) -> None:
        self._backend: MegatronBackend = build_teacher(context, folder)
        self._top_k = top_k

    def score(self, groups: Sequence[TokenTree]) -> list[TeacherScores]:
        """Returns the scores of each group."""
        if not self._top_k:
            return [
                TeacherScores(logprobs.astype(np.float32), None, None) for logprobs in self._backend.logprobs(groups)
            ]
        return [
            TeacherScores(
                scores.logprobs.astype(np.float32),
                scores.top_ids.astype(np.int32),
                scores.top_logprobs.astype(np.float32),
            )
            for scores in self._backend.top_logprobs(groups, top_k=self._top_k)
        ]


class EngineTeacher:
    """Requests the scores from engine ``number`` of the teachers' engines. Waits for the restart of a dead engine.

    ``media`` copies images and videos to the engine's node. It is None if the engine can always read the media items.
    """

    def __init__(
        self,
        context: RunContext,
        directory: EngineDirectory,
        number: int,
        *,
        top_k: int,
        media: EngineMedia | None = None,
    ) -> None:
        self._directory, self._number, self._top_k, self._media = directory, number, top_k, media
        self._temperature = context.config.rollout.temperature
        # A teacher may have a smaller vocabulary than the student. Its additional ids without text are not banned.
        folder = list(context.teacher_folders.values())[number]
        rows = int(language_values(read_hf_config(folder))["vocab_size"])
        self._banned = [token for token in context.config.rollout.banned() if token < rows]
        self._start_timeout_s = context.config.engine.start_timeout_s

    def score(self, groups: Sequence[TokenTree]) -> list[TeacherScores]:
        """Returns the scores of each group. Raises EngineUnreachable if the engine does not restart in time."""
        paths = [[_path_of(group, leaf) for episode in group.episodes for leaf in episode.leaves] for group in groups]
        sequences = [_to_score(group, path) for group, own in zip(groups, paths, strict=True) for path in own]
        scores = iter([scored for call in _calls(sequences) for scored in self._ask(call)])
        return [
            self._of_rows(group, [(path, next(scores)) for path in own])
            for group, own in zip(groups, paths, strict=True)
        ]

    def _ask(self, sequences: list[TokensToScore]) -> list[TokenScores]:
        lost_since: float | None = None
        while True:
            client = self._directory.client(self._number)
            try:
                if self._media is not None:
                    self._media.fetch(
                        self._number, client.url, [medium for sequence in sequences for medium in sequence.media]
                    )
                return client.score(
                    sequences, top_k=self._top_k, temperature=self._temperature, banned_token_ids=self._banned
                )
            except EngineUnreachable:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > self._start_timeout_s:
                    raise
                self._directory.forget(client.url)
                time.sleep(RETRY_S)  # the engine's owner restarts the engine

    def _of_rows(self, group: TokenTree, scored: list[tuple[_Path, TokenScores]]) -> TeacherScores:
        """Returns the scores of a group's rows. The scores of each path start at the path's first sampled row."""
        logprobs = np.zeros(group.rows, dtype=np.float32)
        ids = np.zeros((group.rows, self._top_k), dtype=np.int32)
        values = np.zeros((group.rows, self._top_k), dtype=np.float32)
        for path, scores in scored:
            sampled = group.versions[path.rows[path.first :]] >= 0
            rows = path.rows[path.first :][sampled]
            logprobs[rows] = scores.logprobs[sampled]
            if self._top_k:
                ids[rows] = scores.top_ids[sampled]
                values[rows] = scores.top_logprobs[sampled]
        return TeacherScores(logprobs, *((ids, values) if self._top_k else (None, None)))


class _Path(NamedTuple):
    """Holds a segment's ``rows``, and the index of the first sampled row in ``rows``."""

    rows: np.ndarray
    first: int


def _path_of(group: TokenTree, leaf: int) -> _Path:
    rows = group.path(leaf)
    return _Path(rows, int(np.argmax(group.versions[rows] >= 0)))


def _to_score(group: TokenTree, path: _Path) -> TokensToScore:
    kept = None if group.kept is None else group.kept.take(path.rows[path.first :])
    ids = group.token_ids[path.rows].tolist()
    return TokensToScore(input_ids=ids, first=path.first, kept=kept, media=_media_of(group, path.rows))


def _media_of(group: TokenTree, rows: np.ndarray) -> list[Media]:
    """Returns the images and videos of a path with these ascending ``rows``, with their positions in the path."""
    starts = np.searchsorted(rows, [medium.start for medium in group.media]).tolist()
    return [
        Media(medium.item, start, start + medium.item.rows)
        for medium, start in zip(group.media, starts, strict=True)
        if start < len(rows) and rows[start] == medium.start
    ]


def _calls(sequences: Sequence[TokensToScore]) -> Iterator[list[TokensToScore]]:
    """Splits the sequences into calls to the engine, and yields the sequences of each call."""
    call: list[TokensToScore] = []
    tokens = kept_bytes = 0
    for sequence in sequences:
        more = 0 if sequence.kept is None else sequence.kept.nbytes
        if call and (tokens + len(sequence.input_ids) > TOKENS_A_CALL or kept_bytes + more > KEPT_BYTES_A_CALL):
            yield call
            call, tokens, kept_bytes = [], 0, 0
        call.append(sequence)
        tokens += len(sequence.input_ids)
        kept_bytes += more
    if call:
        yield call


class TeacherWorker(ColumnWorker):
    """Writes the teacher's columns of every group; the group's column `TEACHER` names the teacher."""

    task = "teacher"
    inputs: tuple[str, ...] = (*c.FORWARD_COLUMNS, c.TEACHER)
    _teachers: Mapping[str, TeacherScorer]
    _owners: Mapping[str, str] = {}  # teacher → the owner of its engine, if the teacher has an engine

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

    def columns_of(self, leased: Sequence[Group]) -> c.GroupColumns:
        """Returns the teacher's columns of each group."""
        of_teachers: dict[str, list[Group]] = defaultdict(list)
        for row in leased:
            of_teachers[msgspec.msgpack.decode(row.columns[c.TEACHER], type=str)].append(row)
        columns: c.GroupColumns = {}
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

    The engine serves the teacher's weights from its start and never gets different weights.
    """

    def _engine_launch(self, port: int) -> EngineLaunch:
        folder = list(self.context.teacher_folders.values())[self._rank]
        return replace(super()._engine_launch(port), model_folder=folder, load_weights=True)

    def _first_port(self) -> int:
        return 0

    def _reconcile(self, client: EngineClient) -> None:
        self.set_state("running", self._url)
