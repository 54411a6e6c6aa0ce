"""The two ways to a teacher's log-probs: a forward pass of the trainer's back end, or an engine's scores."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from relax_core.contracts.engine import EngineUnreachable
from relax_core.contracts.tree import TokenTree
from relax_core.engines.protocol.score_calls import TokenScores, TokensToScore
from relax_core.roles.engine.engine_directory import EngineDirectory
from relax_core.roles.process.role_context import RunContext
from relax_core.roles.trainer.build_backend import build_teacher

if TYPE_CHECKING:
    from relax_core.train.policy_backend import MegatronBackend

TOKENS_A_CALL = 16384  # that an engine scores in one call; with top_k = 16 some 10 MB of JSON
KEPT_BYTES_A_CALL = 16 << 20  # of kept sets, which travel as a third more of base64
RETRY_S = 0.1


class TeacherScores(NamedTuple):
    """Of a group's rows, 0 where nothing was sampled: their log-probs float32 ``[rows]``; the teacher's most likely
    tokens int32 ``[rows, top_k]``, most likely first, and their log-probs float32, both None where top_k is 0. Where a
    kept set has fewer tokens the ids end in -1 and the log-probs in `kept_tokens.OUTSIDE`."""

    logprobs: np.ndarray
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None


class TeacherScorer(Protocol):
    """One teacher. Its log-probs are those of softmax(logits / rollout.temperature) over the kept sets of the sampled
    tokens and without the banned tokens, as the student's are: a teacher with the student's weights differs from it
    nowhere."""

    def score(self, groups: Sequence[TokenTree]) -> list[TeacherScores]: ...


class ForwardTeacher:
    """A Megatron model in this process, without gradient."""

    def __init__(self, context: RunContext, folder: Path, *, top_k: int) -> None:
        self._backend: MegatronBackend = build_teacher(context, folder)
        self._top_k = top_k

    def score(self, groups: Sequence[TokenTree]) -> list[TeacherScores]:
        if not self._top_k:
            return [TeacherScores(one.astype(np.float32), None, None) for one in self._backend.logprobs(groups)]
        return [
            TeacherScores(
                one.logprobs.astype(np.float32), one.top_ids.astype(np.int32), one.top_logprobs.astype(np.float32)
            )
            for one in self._backend.top_logprobs(groups, top_k=self._top_k)
        ]


class EngineTeacher:
    """Engine ``number`` of the teachers' own; one that died is waited for as long as its start may take."""

    def __init__(self, context: RunContext, directory: EngineDirectory, number: int, *, top_k: int) -> None:
        self._directory, self._number, self._top_k = directory, number, top_k
        self._temperature = context.config.rollout.temperature
        self._banned = context.config.rollout.banned()
        self._patience_s = context.config.engine.start_timeout_s

    def score(self, groups: Sequence[TokenTree]) -> list[TeacherScores]:
        paths = [[_path_of(group, leaf) for one in group.episodes for leaf in one.leaves] for group in groups]
        asked = [_to_score(group, path) for group, own in zip(groups, paths, strict=True) for path in own]
        scores = iter([one for call in _calls(asked) for one in self._ask(call)])
        return [
            self._of_rows(group, [(path, next(scores)) for path in own])
            for group, own in zip(groups, paths, strict=True)
        ]

    def _ask(self, rows: list[TokensToScore]) -> list[TokenScores]:
        lost_since: float | None = None
        while True:
            client = self._directory.client(self._number)
            try:
                return client.score(
                    rows, top_k=self._top_k, temperature=self._temperature, banned_token_ids=self._banned
                )
            except EngineUnreachable:
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since > self._patience_s:
                    raise
                self._directory.forget(client.url)
                time.sleep(RETRY_S)  # its owner restarts it

    def _of_rows(self, group: TokenTree, scored: list[tuple[_Path, TokenScores]]) -> TeacherScores:
        """``scored``: each path's rows from its first sampled one on have one score."""
        logprobs = np.zeros(group.rows, dtype=np.float32)
        ids = np.zeros((group.rows, self._top_k), dtype=np.int32)
        values = np.zeros((group.rows, self._top_k), dtype=np.float32)
        for path, one in scored:
            sampled = group.versions[path.rows[path.first :]] >= 0
            rows = path.rows[path.first :][sampled]
            logprobs[rows] = one.logprobs[sampled]
            if self._top_k:
                ids[rows] = one.top_ids[sampled]
                values[rows] = one.top_logprobs[sampled]
        return TeacherScores(logprobs, *((ids, values) if self._top_k else (None, None)))


class _Path(NamedTuple):
    """A segment: its ``rows``, and the place in them of the first that was sampled."""

    rows: np.ndarray
    first: int


def _path_of(group: TokenTree, leaf: int) -> _Path:
    rows = group.path(leaf)
    return _Path(rows, int(np.argmax(group.versions[rows] >= 0)))


def _to_score(group: TokenTree, path: _Path) -> TokensToScore:
    kept = None if group.kept is None else group.kept.take(path.rows[path.first :])
    return TokensToScore(input_ids=group.token_ids[path.rows].tolist(), first=path.first, kept=kept)


def _calls(rows: Sequence[TokensToScore]) -> Iterator[list[TokensToScore]]:
    """Rows that go to the engine together."""
    call: list[TokensToScore] = []
    tokens = kept_bytes = 0
    for row in rows:
        more = 0 if row.kept is None else row.kept.nbytes
        if call and (tokens + len(row.input_ids) > TOKENS_A_CALL or kept_bytes + more > KEPT_BYTES_A_CALL):
            yield call
            call, tokens, kept_bytes = [], 0, 0
        call.append(row)
        tokens += len(row.input_ids)
        kept_bytes += more
    if call:
        yield call
