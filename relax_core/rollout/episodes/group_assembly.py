"""Builds the token tree of a group from scored episodes, and the complete group for the bus.

A row of the tree is a token at a position. Episodes share rows that were not sampled, such as prompt rows, if the token
ids and the recorded routed experts are equal. The rows of an image or a video are shared completely or not at all, and
only for the same item. A response always has new rows. Sampled rows are shared only by later prompts that continue this
response; the tree forks after the shared rows. If a prompt differs from the episode's earlier history, its path forks
after the last common row. Without a common row, the group is a forest.

`token_accounts` accounts for every sampled token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
import numpy as np

from relax_core.contracts.bus import Group
from relax_core.contracts.columns import ROUTED_EXPERTS, TEACHER, encode_tree
from relax_core.contracts.engine import Generated
from relax_core.contracts.env import CUT_ENDS
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media
from relax_core.contracts.tree import NOT_SAMPLED, TRUNCATED, Episode, TokenTree, Turn, group_uid
from relax_core.rollout.dynamic_sampling import GroupFilter, compared_numbers
from relax_core.rollout.episodes.episode_records import EpisodeRecord

Lost = Callable[[TokenTree], None]  # receives the tree of episodes that do not go to the bus
MakeExtras = Callable[[TokenTree], Mapping[str, np.ndarray]]  # computes further columns of a complete group
MIN_SAMPLES = 2  # a group-relative advantage of one sample has no meaning

# Why sampled tokens are not trained. not_chosen: a later start of the episode replaced them. orphan: no client of an
# endpoint received the answer. no_reward: the episode has no reward. dropped: the group was dropped or cancelled.
# masked: the loss mask leaves them out. stale: their weights are older than the staleness window, or the episode ended
# for this reason.
REASONS = ("not_chosen", "orphan", "no_reward", "dropped", "masked", "stale")
_OF_END = {"stale": "stale", "cancelled": "dropped"}  # episode's end → reason; else no_reward


@dataclass(frozen=True, kw_only=True)
class DroppedGroup:
    """Holds the uid of a group that is not trained, and the reason."""

    group_uid: str
    reason: str


def complete_group(
    *,
    index: int,
    episodes: Sequence[EpisodeRecord],
    refuse: GroupFilter | None = None,
    teacher: str | None = None,
    mask_off_policy: bool = False,
    mask_truncated: bool = False,
    extras: MakeExtras | None = None,
    account: Callable[[Mapping[str, int]], None] = lambda counts: None,
    lost: Lost | None = None,
) -> Group | DroppedGroup:
    """Returns the group for the bus from its ended and scored episodes, or a `DroppedGroup`.

    An episode without a reward is dropped from the group. The group is dropped if fewer than two episodes have a
    reward; a group with a single episode is dropped if this episode has no reward. ``refuse`` may also drop a group.
    ``teacher`` is the name of the teacher that scores the group. ``extras`` computes further columns of a kept group.
    ``account`` receives the `token_accounts` of the group, and ``lost`` receives the tree of dropped episodes.

    With ``mask_off_policy``, only the tokens of an episode's newest weight version are trained, and the episode has
    this version. With ``mask_truncated``, an episode that was cut at a token limit is not trained. A masked episode
    stays in the group, because its reward is part of the baseline. A group without trained tokens is dropped. Raises
    ValueError if a sampled token is not in its kept set, the tokens that the engine sampled from.
    """
    uid = group_uid(index)
    kept = [episode for episode in episodes if episode.reward is not None]
    dropped = {episode.uid: episode.why_dropped for episode in episodes if episode.reward is None}
    whole = len(kept) < min(MIN_SAMPLES, len(episodes))
    if lost is not None and dropped:
        report_lost(lost, uid, [episode for episode in episodes if whole or episode.reward is None])
    if whole:
        account(token_accounts(episodes, None))
        return DroppedGroup(group_uid=uid, reason=next(iter(dropped.values())))  # of the first dropped episode
    tree = _masked(build_tree(uid, kept), mask_off_policy=mask_off_policy, mask_truncated=mask_truncated)
    trained = tree.trained_episodes()
    refused: str | None = None
    if not trained.any():
        refused = TRUNCATED
    elif refuse is not None:
        refused = refuse(compared_numbers(tree.episodes, refuse.parts if isinstance(refuse, GroupFilter) else ()))
    account(token_accounts(episodes, tree if refused is None else None))
    if refused is not None:
        if lost is not None:
            lost(tree)
        return DroppedGroup(group_uid=uid, reason=refused)
    oldest = tree.oldest_versions(trained=True)
    if extras is not None:
        tree = tree.with_extras(**extras(tree))
    named = {} if teacher is None else {TEACHER: msgspec.msgpack.encode(teacher)}
    return Group(
        group_uid=uid,
        index=index,
        uids=[episode.uid for episode in tree.episodes],
        versions=np.maximum(oldest, oldest[trained].min()).tolist(),  # untrained tokens do not make a group stale
        columns=encode_tree(tree) | named,
        dropped=dropped,
    )


def _masked(tree: TokenTree, *, mask_off_policy: bool, mask_truncated: bool) -> TokenTree:
    """Returns the tree with the loss mask that `complete_group` explains."""
    if not (mask_off_policy or mask_truncated):
        return tree
    loss_mask = tree.loss_mask.copy()
    for episode in tree.episodes:
        newest = max(version for turn in episode.turns for version, _ in turn.versions)
        for turn in episode.turns:
            own = slice(turn.start, turn.end)  # no other episode has these rows, because sampled rows are always new
            if mask_off_policy:
                loss_mask[own] = tree.versions[own] == newest
            if mask_truncated and episode.ended in CUT_ENDS:
                loss_mask[own] = False
    return tree.with_loss_mask(loss_mask)


def report_lost(lost: Lost, uid: str, episodes: Sequence[EpisodeRecord]) -> None:
    """Calls ``lost`` with the tree of the episodes of group ``uid`` that have sampled tokens, if any have."""
    gone = [
        episode
        for episode in episodes
        if episode.turns and all(len(turn.response.output_ids) for turn in episode.turns)
    ]
    if gone:
        lost(build_tree(uid, gone))


def token_accounts(
    episodes: Sequence[EpisodeRecord], tree: TokenTree | None, *, oldest_version: int = 0
) -> dict[str, int]:
    """Returns the number of "sampled" tokens, of "trained" tokens, and of untrained tokens by reason (`REASONS`).

    ``tree`` is the group's token tree, None if the group was dropped. Rows with a weight version below
    ``oldest_version`` are not trained. "sampled" is the sum of all other counts.
    """
    counts = dict.fromkeys(("trained", *REASONS), 0)
    for episode in episodes:
        counts["not_chosen"] += episode.not_chosen
        counts["orphan"] += episode.orphan
        sampled = sum(len(turn.response.output_ids) for turn in episode.turns)
        if episode.reward is None:
            counts[_OF_END.get(episode.ended or "", "no_reward")] += sampled
        elif tree is None:
            counts["dropped"] += sampled
    if tree is not None:
        _, rows = tree.tokens
        assert np.bincount(rows).max(initial=0) <= 1, "each draw has separate rows"
        stale = tree.versions[rows] < oldest_version
        mask = tree.loss_mask[rows]
        counts["trained"] = int((mask & ~stale).sum())
        counts["stale"] += int((mask & stale).sum())
        counts["masked"] = int((~mask).sum())
    counts["sampled"] = sum(counts.values())
    whole = sum(len(turn.response.output_ids) for episode in episodes for turn in episode.turns)
    assert counts["sampled"] == whole + counts["not_chosen"] + counts["orphan"], "a sampled token is in no account"
    return counts


LONGEST_KEY = 64  # characters of a state's key; the tree stores digests of longer keys


@dataclass(slots=True, eq=False, kw_only=True)
class Chain:
    """Holds adjacent rows without a fork between them: a part of a prompt or of a response.

    ``token_ids`` is int32 ``[rows]``. ``response`` is the response that sampled these rows, and ``offset`` is the index
    of the first row in the response. ``experts`` ``[known rows, layers, experts per token]`` may lack the last row of a
    response: an engine does not run the model on the last sampled token, so this token's experts are known only from a
    later turn. ``media`` has the positions of the images and videos in these rows; the rows of an item are never split.
    ``first`` is the number of the chain's first row in the tree, set by `TreeBuilder.chains`.
    """

    token_ids: np.ndarray
    parent: Chain | None
    response: Generated | None = None
    offset: int = 0
    experts: np.ndarray | None = None
    media: list[Media] = field(default_factory=list)
    children: list[Chain] = field(default_factory=list)
    first: int = 0

    @property
    def end(self) -> int:
        """Returns the number of the row after the chain's last row."""
        return self.first + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Holds rows after a position that were not sampled there; ``experts`` has one entry per row, or is None."""

    ids: np.ndarray
    experts: np.ndarray | None
    media: Sequence[Media]

    def after(self, rows: int) -> _Rows:
        """Returns the rows after the first ``rows`` rows."""
        experts = None if self.experts is None else self.experts[rows:]
        return _Rows(self.ids[rows:], experts, _after(self.media, rows))


class TreeBuilder:
    """Builds the token tree of one group; ``root`` is an empty chain before all rows.

    The methods take and return positions in the tree. A position is the end of a `Chain`.
    """

    def __init__(self) -> None:
        self.root = Chain(token_ids=np.empty(0, dtype=np.int32), parent=None)

    def observe(
        self,
        at: Chain,
        ids: Sequence[int] | np.ndarray,
        experts: np.ndarray | None = None,
        media: Sequence[Media] = (),
    ) -> Chain:
        """Adds ``ids``, which were not sampled, after the position ``at``; returns the position after the last id.

        Existing rows after ``at`` are shared if they have the same ids, ``experts`` ``[ids, layers, experts per
        token]`` and media items.
        """
        return self._observe(at, _Rows(np.asarray(ids, dtype=np.int32), experts, media))

    def _observe(self, at: Chain, rest: _Rows) -> Chain:
        while len(rest.ids):
            shared, common = None, 0
            for child in at.children:
                if child.response is None and (common := _common(child, rest)):
                    shared = child
                    break
            if shared is None:
                chain = Chain(token_ids=rest.ids, parent=at, experts=rest.experts, media=list(rest.media))
                at.children.append(chain)
                return chain
            at = _ended_at(shared, common)
            rest = rest.after(common)
        return at

    def sample(self, at: Chain, response: Generated) -> Chain:
        """Adds new rows for a response that was sampled at ``at``; returns the position after the response."""
        chain = Chain(token_ids=response.output_ids, parent=at, response=response, experts=response.response_experts)
        at.children.append(chain)
        return chain

    def follow(
        self,
        own: Chain,
        ids: Sequence[int] | np.ndarray,
        experts: np.ndarray | None = None,
        media: Sequence[Media] = (),
    ) -> Chain:
        """Adds a prompt ``ids`` of an episode with a path that ends at ``own``; returns the position after the prompt.

        ``ids`` start at the root. The rows of the path, including sampled rows, are shared up to the first difference
        in ids, ``experts`` or ``media``. The remaining ids are added by `observe`.
        """
        path = [own]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        at, rest = self.root, _Rows(np.asarray(ids, dtype=np.int32), experts, media)
        for chain in reversed(path[:-1]):
            common = _common(chain, rest)
            if common:
                _learn_last(chain, rest.experts, common)
                at = _ended_at(chain, common)
                rest = rest.after(common)
            if at is not chain:
                break
        return self._observe(at, rest)

    def add(self, episode: EpisodeRecord) -> list[Chain]:
        """Adds an episode's rows, and returns the position after each turn of the episode."""
        ends: list[Chain] = []
        for turn in episode.turns:
            _check_kept(turn.response, episode.uid)
            before = ends[-1] if ends else self.root
            own = before if turn.after is None else ends[turn.after]
            at = self.follow(own, turn.prompt_ids, turn.response.prompt_experts, turn.media)
            ends.append(self.sample(at, turn.response))
        return ends

    def chains(self) -> list[Chain]:
        """Returns all chains depth-first, and sets ``first`` of each chain."""
        found: list[Chain] = []
        rows, open_chains = 0, list(reversed(self.root.children))
        while open_chains:
            chain = open_chains.pop()
            chain.first = rows
            rows += len(chain.token_ids)
            found.append(chain)
            open_chains += reversed(chain.children)
        return found


def build_tree(group_uid: str, episodes: Sequence[EpisodeRecord]) -> TokenTree:
    """Returns the tree of these episodes; its loss mask includes every sampled row.

    Raises ValueError if a sampled token is not in its kept set.
    """
    builder = TreeBuilder()
    ends = [builder.add(episode) for episode in episodes]
    chains = builder.chains()
    rows = chains[-1].end
    end = np.empty(rows, dtype=np.int32)
    logprobs, versions = np.zeros(rows, dtype=np.float32), np.full(rows, NOT_SAMPLED, dtype=np.int32)
    subtree_ends = {id(chain): chain.end for chain in chains}
    for chain in reversed(chains):
        if chain.children:
            subtree_ends[id(chain)] = subtree_ends[id(chain.children[-1])]
        end[chain.first : chain.end] = subtree_ends[id(chain)]
        if chain.response is not None:
            own = slice(chain.offset, chain.offset + len(chain.token_ids))
            logprobs[chain.first : chain.end] = chain.response.logprobs[own]
            versions[chain.first : chain.end] = chain.response.versions[own]
    experts = _experts(chains)
    return TokenTree(
        group_uid=group_uid,
        token_ids=np.concatenate([chain.token_ids for chain in chains]),
        end=end,
        loss_mask=versions >= 0,
        logprobs=logprobs,
        versions=versions,
        episodes=[_episode(*pair) for pair in zip(episodes, ends, strict=True)],
        media=[moved_media(medium, chain.first) for chain in chains for medium in chain.media],
        kept=_kept(chains),
        extras={} if experts is None else {ROUTED_EXPERTS: experts},
    )


def version_spans(versions: np.ndarray) -> list[tuple[int, int]]:
    """Returns (version, number of tokens) of each span of adjacent tokens with the same weight version."""
    if not len(versions):
        return []
    first = int(versions[0])
    if (versions == first).all():  # the usual case; the general code takes ten times longer
        return [(first, len(versions))]
    starts = np.flatnonzero(np.diff(versions, prepend=NOT_SAMPLED - 1))
    sizes = np.diff(starts, append=len(versions))
    return list(zip(versions[starts].tolist(), sizes.tolist(), strict=True))


def _episode(played: EpisodeRecord, ends: Sequence[Chain]) -> Episode:
    inner: set[int] = set()  # chains with a later turn of the episode after them
    for chain in ends:
        above = chain.parent
        while above is not None:
            inner.add(id(above))
            above = above.parent
    turns = [
        Turn(
            chain.end - len(turn.response.output_ids),
            chain.end,
            turn.response.engine,
            version_spans(turn.response.versions),
            turn.response.finish_reason,
            turn.reward,
            turn.began_s,
            turn.ended_s,
            None if turn.state_key is None else _short_key(turn.state_key),
            list(turn.tools),
            turn.env_ms,
        )
        for turn, chain in zip(played.turns, ends, strict=True)
    ]
    leaves = [chain.end - 1 for chain in ends if id(chain) not in inner]
    why = played.output.why or played.output.reason
    return Episode(played.uid, leaves, played.reward, played.parts, turns, played.ended or "", why)


def _short_key(key: str) -> str:
    """Returns a state's key, or the digest of a long key: every reader of the bus and the ledger receives the keys."""
    return key if len(key) <= LONGEST_KEY else blake2b(key.encode(), digest_size=16).hexdigest()


def moved_media(medium: Media, rows: int) -> Media:
    """Returns the position of a media item, moved by ``rows`` rows."""
    return msgspec.structs.replace(medium, start=medium.start + rows, end=medium.end + rows)


def _after(media: Sequence[Media], rows: int) -> list[Media]:
    """Returns the media items that begin at or after row ``rows``; their positions are relative to this row."""
    return [moved_media(medium, -rows) for medium in media if medium.start >= rows]


def _common(chain: Chain, rest: _Rows) -> int:
    """Returns how many first rows of the chain and of ``rest`` are equal; known experts must be equal, too.

    The common rows end before the first media item that differs, and never inside an item.
    """
    length = min(len(chain.token_ids), len(rest.ids))
    same = chain.token_ids[:length] == rest.ids[:length]
    if rest.experts is not None and chain.experts is not None:
        known = min(length, len(chain.experts))
        same[:known] &= (chain.experts[:known] == rest.experts[:known]).all((1, 2))
    common = length if same.all() else int(same.argmin())
    if chain.media or rest.media:
        mine, theirs = (
            {(medium.start, medium.item.digest): medium.end for medium in media} for media in (chain.media, rest.media)
        )
        for (start, digest), end in (*mine.items(), *theirs.items()):
            if start < common and (end > common or (start, digest) not in mine.keys() & theirs.keys()):
                common = start
    return common


def _learn_last(chain: Chain, experts: np.ndarray | None, common: int) -> None:
    """Adds the experts of a response's last token, which are known from a later turn."""
    if experts is not None and chain.experts is not None and len(chain.experts) < common:
        chain.experts = np.concatenate([chain.experts, experts[len(chain.experts) : common]])


def _ended_at(chain: Chain, rows: int) -> Chain:
    """Returns a chain with the first ``rows`` rows of ``chain``; a longer ``chain`` is split after these rows.

    ``chain`` keeps the later rows, because existing positions must stay valid. It becomes the first child of the
    returned chain, because a response's rows must stay adjacent.
    """
    if rows == len(chain.token_ids):
        return chain
    assert chain.parent is not None and rows
    head = Chain(
        token_ids=chain.token_ids[:rows],
        parent=chain.parent,
        response=chain.response,
        offset=chain.offset,
        experts=None if chain.experts is None else chain.experts[:rows],
        media=[medium for medium in chain.media if medium.start < rows],
        children=[chain],
    )
    siblings = chain.parent.children
    siblings[siblings.index(chain)] = head
    chain.parent = head
    chain.token_ids = chain.token_ids[rows:]
    chain.media = _after(chain.media, rows)
    chain.experts = None if chain.experts is None else chain.experts[rows:]
    chain.offset += rows
    return head


def _experts(chains: Sequence[Chain]) -> np.ndarray | None:
    """Returns the experts of each row, ``[rows, layers, experts per token]``, or None if they were not recorded.

    Rows have zeros if no engine ran the model on them.
    """
    if chains[0].experts is None:
        return None
    parts = []
    for chain in chains:
        known = chain.experts
        assert known is not None, "either all prompts of a run request routed experts or none does"
        parts += [known, np.zeros((len(chain.token_ids) - len(known), *known.shape[1:]), np.uint8)]
    return np.concatenate(parts)


def _check_kept(response: Generated, uid: str) -> None:
    """Raises ValueError if a sampled token of episode ``uid`` is not in its kept set."""
    if response.kept is not None and (fault := response.kept.fault(response.output_ids)) is not None:
        raise ValueError(f"{response.engine or 'the engine'}, sample {uid}: {fault}")


def _kept(chains: Sequence[Chain]) -> KeptTokens | None:
    """Returns one kept set per row, or None without kept sets. For unsampled rows it is the whole vocabulary."""
    responses = [chain.response for chain in chains if chain.response is not None]
    sizes = {response.kept.vocab_size for response in responses if response.kept is not None}
    if not sizes:
        return None
    (vocab_size,) = sizes
    parts = []
    for chain in chains:
        if chain.response is None:
            parts.append(KeptTokens.whole(len(chain.token_ids), vocab_size=vocab_size))
            continue
        kept = chain.response.kept
        assert kept is not None, "either all prompts of a run request kept sets or none does"
        parts.append(kept.take(np.arange(chain.offset, chain.offset + len(chain.token_ids))))
    return KeptTokens.joined(parts)
