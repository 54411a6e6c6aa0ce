"""Makes token trees for tests and benchmarks: a prompt with answers, and random trees of any depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from relax_core.contracts.bus import Group
from relax_core.contracts.columns import decode_tree
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.tree import BY_TOKEN, NOT_SAMPLED, Episode, TokenTree, Turn


def answers_tree(
    uid: str,
    prompt_ids: Sequence[int] | np.ndarray,
    lengths: Sequence[int] | np.ndarray,
    answer_ids: Sequence[int] | np.ndarray,
    *,
    logprobs: Any = 0.0,
    loss_mask: Any = True,
    versions: Any = 0,
    rewards: Sequence[float] | None = None,
    kept: KeptTokens | None = None,
    routed_experts: np.ndarray | None = None,
    ended: str = "stop",
    engine: str = "engine-0",
    **extras: np.ndarray,
) -> TokenTree:
    """Returns a prompt with its answers. Each answer is one episode. ``answer_ids``, ``logprobs``, ``loss_mask``,
    ``versions``, ``kept`` and the extras have one entry per answer token, answer after answer. ``routed_experts``: rows
    of the prompt, then rows of each answer's tokens except the last.
    """
    trunk, lengths = len(prompt_ids), np.asarray(lengths)
    rows = trunk + int(lengths.sum())
    behind = trunk + np.cumsum(lengths)

    def of_rows(values: Any, dtype: str, otherwise: float) -> np.ndarray:
        whole = np.full((rows, *np.shape(values)[1:]), otherwise, dtype=dtype)
        whole[trunk:] = values
        return whole

    starts = (behind - lengths).tolist()
    episodes = []
    own_versions = of_rows(versions, "int32", NOT_SAMPLED)
    for place, (first, last) in enumerate(zip(starts, behind.tolist(), strict=True)):
        runs = [
            (int(version), int((own_versions[first:last] == version).sum()))
            for version in dict.fromkeys(own_versions[first:last].tolist())
        ]
        reward = 0.0 if rewards is None else float(rewards[place])
        turn = Turn(first, last, engine, runs, ended)
        episodes.append(Episode(f"{uid}.{place}", [last - 1], reward, {"exact": float(reward == 1.0)}, [turn], ended))
    tree = TokenTree(
        group_uid=uid,
        token_ids=np.concatenate([np.asarray(prompt_ids), np.asarray(answer_ids)]).astype(np.int32),
        end=np.concatenate([np.full(trunk, rows), np.repeat(behind, lengths)]).astype(np.int32),
        loss_mask=of_rows(loss_mask, "bool", False),
        logprobs=of_rows(logprobs, "float32", 0.0),
        versions=own_versions,
        episodes=episodes,
        kept=None if kept is None else KeptTokens.joined([KeptTokens.whole(trunk, vocab_size=kept.vocab_size), kept]),
        extras={
            name: values if name in BY_TOKEN else of_rows(values, values.dtype.name, 0.0)
            for name, values in extras.items()
        },
    )
    return tree if routed_experts is None else with_experts(tree, routed_experts)


def tree_of(row: Group) -> TokenTree:
    """Returns the tree of a bus group."""
    return decode_tree(row)


def rewards_of(tree: TokenTree) -> list[float | None]:
    return [episode.reward for episode in tree.episodes]


def answer_ids(tree: TokenTree) -> np.ndarray:
    """Returns the token ids of the tree's tokens, int32 ``[tokens]``."""
    return tree.token_ids[tree.tokens[1]]


def prompt_of(tree: TokenTree) -> np.ndarray:
    """Returns the token ids before the first sampled row: the prompt of a tree with one prompt."""
    return tree.token_ids[: int(tree.sampled[0])]


def answers_of(tree: TokenTree) -> list[np.ndarray]:
    """Returns the token ids of each episode."""
    return np.split(answer_ids(tree), np.cumsum(tree.lengths)[:-1])


def of_tokens(tree: TokenTree, of_rows: np.ndarray) -> np.ndarray:
    """Converts ``[rows, …]`` to ``[tokens, …]``."""
    return of_rows[tree.tokens[1]]


def with_tokens(tree: TokenTree, **values: Any) -> TokenTree:
    """Returns the tree with new ``loss_mask``, ``logprobs``, ``versions``, ``kept`` or extras. Each has one entry per
    token. A row that two episodes share gets the value of the last episode.
    """
    rows, extras = tree.tokens[1], dict[str, np.ndarray]()
    fields: dict[str, Any] = {}
    for name, of_its_tokens in values.items():
        if name == "kept":
            places = np.zeros(tree.rows, dtype=np.int64)  # rows without a token get the first set
            places[rows] = np.arange(1, len(rows) + 1)
            whole_set = KeptTokens.whole(1, vocab_size=of_its_tokens.vocab_size)
            fields[name] = KeptTokens.joined([whole_set, of_its_tokens]).take(places)
            continue
        given = np.asarray(of_its_tokens)
        if name in BY_TOKEN:
            extras[name] = given
            continue
        kept = getattr(tree, name) if name in ("loss_mask", "logprobs", "versions") else None
        whole = np.zeros((tree.rows, *given.shape[1:]), dtype=given.dtype) if kept is None else kept.copy()
        whole[rows] = given
        (extras if kept is None else fields)[name] = whole
    return replace(tree, **fields, extras={**tree.extras, **extras})


def with_experts(tree: TokenTree, experts: np.ndarray) -> TokenTree:
    """Returns the tree with routed experts ``[computed rows, layers, experts per token]``. They lack each branch's last
    row.
    """
    whole = np.zeros((tree.rows, *experts.shape[1:]), dtype=experts.dtype)
    whole[tree.end > np.arange(tree.rows) + 1] = experts
    return tree.with_extras(routed_experts=whole)


def path_of(tree: TokenTree, row: int) -> np.ndarray:
    """Returns the rows visible to ``row``, int64, by the definition of ``end``. The last of them is ``row``."""
    return np.flatnonzero(tree.end[: row + 1] > row)


class _Grown:
    """Grows a random forest, depth first."""

    def __init__(self, random: np.random.Generator, *, vocabulary: int, longest: int) -> None:
        self._random, self._vocabulary, self._longest = random, vocabulary, longest
        self.token_ids: list[int] = []
        self.end: list[int] = []
        self.versions: list[int] = []
        self.leaves: list[int] = []
        self.turns: list[tuple[int, int]] = []

    def grow(self, depth: int, sampled: bool, *, deepest: int, fan_out: int, share: bool) -> None:
        random, first = self._random, len(self.token_ids)
        count = int(random.integers(1, self._longest + 1))
        self.token_ids += random.integers(0, self._vocabulary, count).tolist()
        self.versions += [int(random.integers(0, 3)) if sampled else NOT_SAMPLED] * count
        self.end += [0] * count
        behind = first + count
        if sampled:
            self.turns.append((first, behind))
        if depth < deepest and (not sampled or random.random() < 0.7):
            forks = int(random.integers(1, fan_out + 1)) if not sampled or share else 1
            for _ in range(forks):
                self.grow(depth + 1, not sampled, deepest=deepest, fan_out=fan_out, share=share)
        else:
            self.leaves.append(behind - 1)
        self.end[first:behind] = [len(self.token_ids)] * count


def random_tree(
    random: np.random.Generator,
    *,
    uid: str = "g00000000",
    vocabulary: int = 32,
    turns: int = 3,
    fan_out: int = 3,
    longest: int = 5,
    roots: int = 1,
    masked: float = 0.2,
    episodes_share: bool = True,
) -> TokenTree:
    """Returns a random forest: observed and sampled rows alternate, and branches fork after both kinds. Each leaf is a
    segment. Neighbouring leaves sometimes belong to one episode. With ``episodes_share`` sampled rows may be before a
    fork, so several episodes share them.
    """
    grown = _Grown(random, vocabulary=vocabulary, longest=longest)
    for _ in range(roots):
        grown.grow(0, False, deepest=2 * turns - 1, fan_out=fan_out, share=episodes_share)
    rows = len(grown.token_ids)
    own, tree_end = np.array(grown.versions, dtype=np.int32), np.array(grown.end, dtype=np.int32)
    groups: list[list[int]] = []
    for leaf in grown.leaves:
        if groups and random.random() < 0.25:
            groups[-1].append(leaf)
        else:
            groups.append([leaf])
    episodes = []
    for place, its in enumerate(groups):
        turns_of = [
            Turn(first, behind, "engine-0", [(int(own[first]), behind - first)], "stop")
            for first, behind in grown.turns
            if any(first <= leaf < tree_end[first] for leaf in its)
        ]
        episodes.append(Episode(f"{uid}.{place}", its, float(random.random()), {}, turns_of, "stop"))
    mask = (own >= 0) & (random.random(rows) >= masked)
    tree = TokenTree(
        group_uid=uid,
        token_ids=np.array(grown.token_ids, dtype=np.int32),
        end=tree_end,
        loss_mask=mask,
        logprobs=np.where(own >= 0, -4 * random.random(rows), 0.0).astype(np.float32),
        versions=own,
        episodes=episodes,
    )
    tokens = len(tree.tokens[1])
    return tree.with_extras(
        advantages=random.standard_normal(tokens).astype(np.float32),
        returns=random.standard_normal(tokens).astype(np.float32),
        values=random.standard_normal(rows).astype(np.float32),
        on_policy=np.ones(tokens, dtype=bool),
    )
