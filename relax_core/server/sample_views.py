"""Builds the page's views of samples: a list with the beginning of each text, and single samples token by token."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from relax_core.contracts import columns as c
from relax_core.contracts.tree import Episode, TokenTree
from relax_core.observe.event_log import TokensAt
from relax_core.observe.sample_index import SampleIndex, every_id
from relax_core.observe.sample_log import (
    PICTURES_FOLDER,
    PLAYED_FOLDER,
    SAMPLES_FOLDER,
    SampleText,
    TokensRemoved,
    read_made_tree,
    read_trained,
)
from relax_core.server.run_folders import inside, reason

SEARCH_S = 20.0  # time limit of a search
SEARCHED = 2000  # one search reads this number of newest samples that match the other filters
PREVIEW = 160  # limit of an answer in a list, in characters
MAX_TOKENS = 20_000  # limit of one sample on the page; a longer sample is cut in the middle
MAX_GROUP, MAX_TEXT = 64, 20_000  # limits of samples of a group side by side, and of characters per text
DIGEST = re.compile(r"[0-9a-f]{32}")
KEPT_ROWS = 1_000_000  # limit of cached rows of recently read trees, about 20 bytes per row


class SampleViews:
    """Reads the samples of one run for the page."""

    def __init__(self, run_dir: Path, index: SampleIndex) -> None:
        self._run_dir, self._index = run_dir, index
        self.problem = ""  # reason why the tokenizer cannot be read
        try:
            self._text: SampleText | None = SampleText(run_dir)
        except (FileNotFoundError, ValueError) as error:
            self._text, self.problem = None, "" if isinstance(error, FileNotFoundError) else reason("samples", error)
        self._trees: OrderedDict[TokensAt, TokenTree] = OrderedDict()
        self._lock = threading.Lock()

    def listed(self, filters: Mapping[str, str | float], *, order: str, first: int, most: int) -> dict[str, Any]:
        """Returns the number of matching samples, and one page of them with the beginning of their answers."""
        count, rows = self._index.find(filters, order=order, first=first, most=most)
        return {"count": count, "rows": [self._with_preview(row) for row in rows], "searched": None}

    def searched(
        self, filters: Mapping[str, str | float], words: str, *, most: int, before: int | None = None
    ) -> dict[str, Any]:
        """Returns the newest samples with ``words`` in their prompt or answer. Ignores case.

        ``before`` is the last id of an earlier search. ``next`` in the result is the last id of this search, or None if
        no older samples exist.
        """
        wanted, found, searched, last = words.casefold(), [], 0, None
        until = time.monotonic() + SEARCH_S
        for row in every_id(self._index, filters, most=SEARCHED, before=before):
            if time.monotonic() > until:
                break
            searched, last = searched + 1, row["id"]
            prompt, answer = self._texts(row)
            if wanted in f"{prompt}{answer}".casefold():
                found.append({**row, "answer": answer[:PREVIEW]})
                if len(found) == most:
                    break
        more = last is not None and self._index.find(filters, most=1, before=last)[0] > 0
        return {"count": len(found), "rows": found, "searched": searched, "next": last if more else None}

    def group(self, uid: str) -> dict[str, Any]:
        """Returns the samples of a group with their full texts."""
        _, rows = self._index.find({"group": uid}, order="oldest", most=MAX_GROUP)
        texts = [self._texts(row) for row in rows]
        return {
            "group": uid,
            "prompt": _cut(texts[0][0]) if texts else "",
            "rows": [{**row, "answer": _cut(answer)} for row, (_, answer) in zip(rows, texts, strict=True)],
        }

    def sample(self, number: int) -> dict[str, Any] | None:
        """Returns a sample with its tokens, or None if it does not exist. ``gone`` says why the tokens are missing."""
        row = self._index.sample(number)
        if row is None:
            return None
        try:
            return {**row, **self._tokens(row), "gone": ""}
        except (TokensRemoved, ValueError) as error:
            nothing = {"tokens": [], "left_out": 0, "turns_of": [], "segments": 1, "media": []}
            return {**row, **nothing, "gone": str(error)}

    def turn_times(self, group: str) -> dict[str, list[tuple[float, float, float]]]:
        """Returns uid → (began, ended, env_s) of each turn, for the samples of a group.

        ``began`` and ``ended`` are Unix times in seconds. ``env_s`` is the time of the environment after the turn, in
        seconds. Leaves out single-turn samples, because their times are not recorded. Also leaves out undone samples
        and samples without tokens.
        """
        found = {}
        for row in self._index.find({"group": group}, order="oldest", most=MAX_GROUP)[1]:
            if row["turns"] > 1 and row["state"] != "undone":
                try:
                    turns = self._tree(row)[0].episodes[row["number"]].turns
                except TokensRemoved:
                    continue
                found[row["uid"]] = [(turn.began_s, turn.ended_s, turn.env_ms / 1e3) for turn in turns]
        return found

    # -- one sample ---------------------------------------------------------------------------------------------------
    def _tree(self, row: Mapping[str, Any]) -> tuple[TokenTree, np.ndarray]:
        """Returns the tree of a sample's group, and the rows on the sample's path."""
        at = TokensAt(row["made_file"], row["made_offset"], row["made_size"])
        with self._lock:
            tree = self._trees.pop(at, None)
            if tree is None:
                tree = read_made_tree(self._run_dir, row["group_uid"], at)
            self._trees[at] = tree
            while len(self._trees) > 1 and sum(known_tree.rows for known_tree in self._trees.values()) > KEPT_ROWS:
                self._trees.popitem(last=False)
        return tree, tree.rows_of([row["number"]])

    def _texts(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """Returns the text before the first sampled token and the text after it.

        For lost tokens, returns the reason.
        """
        try:
            tree, rows = self._tree(row)
        except (TokensRemoved, ValueError) as error:
            return "", f"({error})"
        sampled = np.flatnonzero(tree.versions[rows] >= 0)
        first = int(sampled[0]) if len(sampled) else len(rows)
        ids = tree.token_ids[rows]
        return self._decode(ids[:first]), self._decode(ids[first:])

    def _decode(self, ids: np.ndarray) -> str:
        shown = ids[:MAX_TOKENS].tolist()
        return " ".join(map(str, shown)) if self._text is None else self._text.text(shown)

    def _with_preview(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "answer": self._texts(row)[1][:PREVIEW]}

    def _tokens(self, row: Mapping[str, Any]) -> dict[str, Any]:
        tree, rows = self._tree(row)
        episode = tree.episodes[row["number"]]
        sampled = tree.versions[rows] >= 0
        columns = self._of_sampled(tree, row, rows[sampled])
        chosen = np.arange(len(rows))
        left_out = max(0, len(rows) - MAX_TOKENS)
        if left_out:
            chosen = np.concatenate([chosen[: MAX_TOKENS // 2], chosen[-MAX_TOKENS // 2 :]])
        ids = tree.token_ids[rows][chosen].tolist()
        pieces = [f"{token_id} " for token_id in ids] if self._text is None else self._text.pieces(ids)
        places = np.cumsum(sampled) - 1
        turn_of = np.zeros(len(rows), dtype=np.int64)
        for number, turn in enumerate(episode.turns):
            turn_of[(rows >= turn.start) & (rows < turn.end)] = number
        tokens = []
        for number, token, piece in zip(chosen.tolist(), ids, pieces, strict=True):
            shown: dict[str, Any] = {"id": token, "text": piece}
            if sampled[number]:
                shown |= {name: _finite(values[places[number]]) for name, values in columns.items()}
                shown["turn"] = int(turn_of[number])
            tokens.append(shown)
        own = set(rows.tolist())
        media = [
            {
                "kind": medium.item.kind,
                "digest": medium.item.digest,
                "rows": medium.end - medium.start,
                "words": medium.item.description,
                "picture": picture_file(self._run_dir, medium.item.digest) is not None,
                "played": played_file(self._run_dir, medium.item.digest) is not None,
            }
            for medium in tree.media
            if medium.start in own
        ]
        segments = len(episode.leaves)
        return {
            "tokens": tokens,
            "left_out": left_out,
            "turns_of": _turns(episode),
            "segments": segments,
            "media": media,
        }

    def _of_sampled(self, tree: TokenTree, row: Mapping[str, Any], rows: np.ndarray) -> dict[str, list[Any]]:
        """Returns name → one value for each sampled token of the sample, in order of rows."""
        columns: dict[str, list[Any]] = {
            "logprob": tree.logprobs[rows].tolist(),
            "version": tree.versions[rows].tolist(),
            "trained": tree.loss_mask[rows].tolist(),
        }
        if c.ADVANTAGES in tree.extras:
            mine = tree.tokens[0] == row["number"]
            columns["advantage"] = tree.extras[c.ADVANTAGES][mine].tolist()
        if row["trained_file"] is not None:
            at = TokensAt(row["trained_file"], row["trained_offset"], row["trained_size"])
            part = read_trained(self._run_dir, at, first=row["trained_first"], count=len(rows))
            columns["advantage"] = part.advantages.tolist()
            if len(part.logprobs):
                columns["trainer_logprob"] = part.logprobs.tolist()
                columns["gap"] = (part.logprobs - tree.logprobs[rows]).tolist()
            columns["trained"] = part.trained.tolist()
        return columns


def _turns(episode: Episode) -> list[dict[str, Any]]:
    return [
        {
            "tokens": turn.end - turn.start,
            "engine": turn.engine,
            "versions": turn.versions,
            "finish": turn.finish,
            "reward": turn.reward,
            "seconds": turn.ended_s - turn.began_s if turn.began_s else None,
            "tools": turn.tools,
            "env_ms": turn.env_ms,
        }
        for turn in episode.turns
    ]


def picture_file(run_dir: Path, digest: str) -> Path | None:
    """Returns the file of an item's small picture, or None if the run has no such picture."""
    return _kept_file(run_dir, digest, PICTURES_FOLDER, f"{digest}.jpg")


def played_file(run_dir: Path, digest: str) -> Path | None:
    """Returns the file of a sound or video, or None if the run has no such file."""
    return _kept_file(run_dir, digest, PLAYED_FOLDER, digest)


def _kept_file(run_dir: Path, digest: str, folder: str, name: str) -> Path | None:
    if not DIGEST.fullmatch(digest):
        return None
    try:
        return inside(run_dir, SAMPLES_FOLDER, folder, name)
    except (OSError, ValueError):
        return None


def _cut(text: str) -> str:
    left_out = len(text) - MAX_TEXT
    return text if left_out <= 0 else f"{text[:MAX_TEXT]} … ({left_out} more characters)"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
