"""From the turns of a group's episodes to its token tree.

Rows that nothing sampled are shared by their ids, and by the experts that they were routed to where these are recorded.
A response's rows are always new: what was sampled is shared only where it is the very same draw, behind which a path
forks. A history that differs from the one before goes on from the last row that both have; where there is none, the
group is a forest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from relax_core.contracts.columns import ROUTED_EXPERTS
from relax_core.contracts.engine import Generated
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.tree import NOT_SAMPLED, Episode, TokenTree, Turn


@dataclass(slots=True, eq=False, kw_only=True)
class Run:
    """Neighbouring rows of one path, each the only child of the one before: of a prompt, or a part of one response.

    ``token_ids`` int32 ``[rows]``. ``response``: the response that sampled these rows, of which they are those from
    ``offset`` on. ``experts`` ``[known rows, layers, experts a token]``: of the first rows; an engine never feeds the
    last token of a response, so that only a later turn tells what that one was routed to. ``first``: its first row,
    once the tree is laid out.
    """

    token_ids: np.ndarray
    parent: Run | None
    response: Generated | None = None
    offset: int = 0
    experts: np.ndarray | None = None
    children: list[Run] = field(default_factory=list)
    first: int = 0

    @property
    def behind(self) -> int:
        return self.first + len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class PlayedTurn:
    """One request of an episode and its response. ``prompt_ids``: all tokens in front of the response. ``reward``: of
    this turn alone. Times are Unix seconds."""

    prompt_ids: Sequence[int]
    response: Generated
    reward: float | None = None
    began_s: float = 0.0
    ended_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PlayedEpisode:
    """One run of model and environment: its turns in order, at least one, and the fields of `Episode`."""

    uid: str
    turns: Sequence[PlayedTurn]
    reward: float | None
    parts: dict[str, float]
    ended: str


class TreeBuilder:
    """Grows the token tree of one group. A place in it is the end of a `Run`; ``root`` is in front of all rows."""

    def __init__(self) -> None:
        self.root = Run(token_ids=np.empty(0, dtype=np.int32), parent=None)

    def observe(self, at: Run, ids: Sequence[int] | np.ndarray, experts: np.ndarray | None = None) -> Run:
        """The place behind ``ids`` that follow ``at`` and were not sampled there. Rows that other paths have there with
        the same ids, and the same ``experts`` ``[ids, layers, experts a token]``, are shared."""
        rest = np.asarray(ids, dtype=np.int32)
        while len(rest):
            shared, common = None, 0
            for child in at.children:
                if child.response is None and (common := _common(child, rest, experts)):
                    shared = child
                    break
            if shared is None:
                run = Run(token_ids=rest, parent=at, experts=experts)
                at.children.append(run)
                return run
            at = _ended_at(shared, common)
            rest, experts = rest[common:], None if experts is None else experts[common:]
        return at

    def sample(self, at: Run, response: Generated) -> Run:
        """The place behind a response that was sampled at ``at``: new rows, whatever their ids."""
        run = Run(token_ids=response.output_ids, parent=at, response=response, experts=response.response_experts)
        at.children.append(run)
        return run

    def follow(self, own: Run, ids: Sequence[int] | np.ndarray, experts: np.ndarray | None = None) -> Run:
        """The place behind ``ids``, which begin at the root, for an episode whose path so far ends at ``own``: along
        that path as far as ids and ``experts`` agree, what was sampled there included, and observed from there on."""
        path = [own]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        at, rest = self.root, np.asarray(ids, dtype=np.int32)
        for run in reversed(path[:-1]):
            common = _common(run, rest, experts)
            if common:
                _learn_last(run, experts, common)
                at = _ended_at(run, common)
                rest, experts = rest[common:], None if experts is None else experts[common:]
            if at is not run:
                break
        return self.observe(at, rest, experts)

    def add(self, episode: PlayedEpisode) -> list[Run]:
        """Grows an episode's rows; returns the place behind each of its turns."""
        ends: list[Run] = []
        for turn in episode.turns:
            own = ends[-1] if ends else self.root
            at = self.follow(own, turn.prompt_ids, turn.response.prompt_experts)
            ends.append(self.sample(at, turn.response))
        return ends

    def runs(self) -> list[Run]:
        """All runs, depth-first, with their ``first`` rows told."""
        found: list[Run] = []
        rows, open_runs = 0, list(reversed(self.root.children))
        while open_runs:
            run = open_runs.pop()
            run.first = rows
            rows += len(run.token_ids)
            found.append(run)
            open_runs += reversed(run.children)
        return found


def build_tree(group_uid: str, episodes: Sequence[PlayedEpisode]) -> TokenTree:
    """The tree of these episodes, each sampled row of which is trained. Raises ValueError for a kept set without the
    token that was sampled from it."""
    builder = TreeBuilder()
    ends = [builder.add(episode) for episode in episodes]
    runs = builder.runs()
    rows = runs[-1].behind
    end = np.empty(rows, dtype=np.int32)
    logprobs, versions = np.zeros(rows, dtype=np.float32), np.full(rows, NOT_SAMPLED, dtype=np.int32)
    behind = {id(run): run.behind for run in runs}
    for run in reversed(runs):
        if run.children:
            behind[id(run)] = behind[id(run.children[-1])]
        end[run.first : run.behind] = behind[id(run)]
        if run.response is not None:
            own = slice(run.offset, run.offset + len(run.token_ids))
            logprobs[run.first : run.behind] = run.response.logprobs[own]
            versions[run.first : run.behind] = run.response.versions[own]
    experts = _experts(runs)
    return TokenTree(
        group_uid=group_uid,
        token_ids=np.concatenate([run.token_ids for run in runs]),
        end=end,
        loss_mask=versions >= 0,
        logprobs=logprobs,
        versions=versions,
        episodes=[_episode(*one) for one in zip(episodes, ends, strict=True)],
        kept=_kept(runs),
        extras={} if experts is None else {ROUTED_EXPERTS: experts},
    )


def version_runs(versions: np.ndarray) -> list[tuple[int, int]]:
    """(version, tokens) of neighbours with one version."""
    if not len(versions):
        return []
    first = int(versions[0])
    if (versions == first).all():  # nearly always: the general way costs ten times as much
        return [(first, len(versions))]
    starts = np.flatnonzero(np.diff(versions, prepend=NOT_SAMPLED - 1))
    sizes = np.diff(starts, append=len(versions))
    return list(zip(versions[starts].tolist(), sizes.tolist(), strict=True))


def _episode(played: PlayedEpisode, ends: Sequence[Run]) -> Episode:
    inner: set[int] = set()  # runs that a later turn of the episode goes on behind
    for run in ends:
        above = run.parent
        while above is not None:
            inner.add(id(above))
            above = above.parent
    turns = [
        Turn(
            run.behind - len(turn.response.output_ids),
            run.behind,
            turn.response.engine,
            version_runs(turn.response.versions),
            turn.response.finish_reason,
            turn.reward,
            turn.began_s,
            turn.ended_s,
        )
        for turn, run in zip(played.turns, ends, strict=True)
    ]
    leaves = [run.behind - 1 for run in ends if id(run) not in inner]
    return Episode(played.uid, leaves, played.reward, played.parts, turns, played.ended)


def _common(run: Run, ids: np.ndarray, experts: np.ndarray | None) -> int:
    """How many of the run's first rows are those of ``ids``, routed to the same experts where both tell."""
    length = min(len(run.token_ids), len(ids))
    same = run.token_ids[:length] == ids[:length]
    if experts is not None and run.experts is not None:
        known = min(length, len(run.experts))
        same[:known] &= (run.experts[:known] == experts[:known]).all((1, 2))
    return length if same.all() else int(same.argmin())


def _learn_last(run: Run, experts: np.ndarray | None, common: int) -> None:
    """A later turn tells what the last token of a response was routed to."""
    if experts is not None and run.experts is not None and len(run.experts) < common:
        run.experts = np.concatenate([run.experts, experts[len(run.experts) : common]])


def _ended_at(run: Run, rows: int) -> Run:
    """The place behind the run's first rows: where it goes on, it is split. The later part stays the same object, so
    that a place that was told before stays what it was; it is the first child, so that a response stays in one piece.
    """
    if rows == len(run.token_ids):
        return run
    assert run.parent is not None and rows
    head = Run(
        token_ids=run.token_ids[:rows],
        parent=run.parent,
        response=run.response,
        offset=run.offset,
        experts=None if run.experts is None else run.experts[:rows],
        children=[run],
    )
    siblings = run.parent.children
    siblings[siblings.index(run)] = head
    run.parent = head
    run.token_ids = run.token_ids[rows:]
    run.experts = None if run.experts is None else run.experts[rows:]
    run.offset += rows
    return head


def _experts(runs: Sequence[Run]) -> np.ndarray | None:
    """What each row was routed to, ``[rows, layers, experts a token]``; 0 where no engine ever fed the row."""
    if runs[0].experts is None:
        return None
    parts = []
    for run in runs:
        assert run.experts is not None, "asked for with every prompt of a run or with none"
        parts += [run.experts, np.zeros((len(run.token_ids) - len(run.experts), *run.experts.shape[1:]), np.uint8)]
    return np.concatenate(parts)


def checked_kept(response: Generated, *, what: str) -> KeptTokens | None:
    """The kept sets of a response, where it has them. Raises ValueError, which names the engine and ``what`` was asked
    for, for sets without the tokens that were sampled from them."""
    kept = response.kept
    if kept is not None and (fault := kept.fault(response.output_ids)) is not None:
        raise ValueError(f"{response.engine or 'the engine'}, {what}: {fault}")
    return kept


def _kept(runs: Sequence[Run]) -> KeptTokens | None:
    """One kept set a row; those of rows that nothing sampled leave nothing out."""
    sizes = {run.response.kept.vocab_size for run in runs if run.response is not None and run.response.kept is not None}
    if not sizes:
        return None
    (vocab_size,) = sizes
    parts = []
    for run in runs:
        if run.response is None:
            parts.append(KeptTokens.whole(len(run.token_ids), vocab_size=vocab_size))
            continue
        kept = checked_kept(run.response, what=f"request {run.response.rid}")
        assert kept is not None, "asked for with every prompt of a run or with none"
        parts.append(kept.take(np.arange(run.offset, run.offset + len(run.token_ids))))
    return KeptTokens.joined(parts)
