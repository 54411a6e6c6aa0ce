"""Builds token trees from data rows for objectives without engines: fine-tuning, preference pairs and labelled rows.

The trained rows of a tree are the tokens of the assistant's messages in the data row, with their stop tokens. The tree
has the same form as a tree of a rollout, with "data" as the engine and log-probs 0.

The label of a labelled row concerns the row's last answer, and only this answer is trained. The tree of such a row also
has the prompt with the answer of another data row, the partner. The partner's answer is not trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from relax_core.contracts.algorithm import Offline
from relax_core.contracts.bus import Group
from relax_core.contracts.columns import ADVANTAGES, encode_tree
from relax_core.contracts.data import TOO_LONG, BadRow, DataRow
from relax_core.contracts.engine import Generated
from relax_core.contracts.env import media_sources
from relax_core.contracts.media import MediaError, MediaItem, MediaSource
from relax_core.contracts.reward import RewardOutput
from relax_core.contracts.tree import OF_DATA, TokenTree, group_uid, sample_uid
from relax_core.data.layouts import CHOSEN, LABEL, MESSAGES, REJECTED, TEXT, TOOLS
from relax_core.data.tokenizer import PromptTokenizer, TextTooLong
from relax_core.data.trained_turns import ASSISTANT, ConversationTokens, TrainedTurn
from relax_core.rollout.episodes.episode_records import EpisodeRecord, PlayedTurn
from relax_core.rollout.episodes.group_assembly import build_tree

Messages = Sequence[Mapping[str, Any]]
PARTNERS = 64  # the number of data rows that are tried as the partner of a labelled row


def partner_rows(number: int, *, count: int, read: Callable[[int], DataRow]) -> Iterator[DataRow]:
    """Yields up to `PARTNERS` usable rows that may be the partner of row ``number``, from ``count`` rows.

    The first is the next row of the file. The others are spread over the file, because adjacent rows may have the same
    prompt. The order depends only on ``number`` and ``count``, so a resumed run has the same partners. ``read`` returns
    the row with a number, or raises `BadRow`.
    """
    others = count - 1
    if others < 1:
        return
    step = next(size for size in range(max(1, round(0.618 * others)), 0, -1) if math.gcd(size, others) == 1)
    for place in range(min(others, PARTNERS)):
        try:
            yield read((number + 1 + place * step % others) % count)
        except BadRow:
            continue


class OfflineRows:
    """Converts data rows of one ``kind`` to groups.

    ``banned`` are token ids that the run never samples (rollout.banned_token_ids); a trained row must not contain them.
    ``max_tokens`` is the largest number of tokens of a conversation, from the first to the last trained token.
    """

    def __init__(
        self, *, tokenizer: PromptTokenizer, kind: Offline, max_tokens: int, banned: Collection[int] = ()
    ) -> None:
        self._tokenizer, self._kind, self._max_tokens = tokenizer, kind, max_tokens
        self._banned = frozenset(banned)
        self._conversations = ConversationTokens(tokenizer)

    def sources(self, row: DataRow) -> list[MediaSource]:
        """Returns the media sources of a data row, in order; `group` takes the encoded items in the same order."""
        found = _conversations(row, self._kind)
        if not found:
            return []
        messages, numbers = found[0]
        return media_sources(messages[: numbers[-1] if numbers else len(messages)])

    def group(
        self,
        row: DataRow,
        *,
        where: str,
        index: int,
        version: int,
        items: Sequence[MediaItem] = (),
        partners: Iterable[DataRow] = (),
    ) -> Group:
        """Returns the group of a data row, with advantage 1 for each token. Raises the errors of `tree`."""
        tree = self.tree(row, where=where, uid=group_uid(index), version=version, items=items, partners=partners)
        tree = tree.with_extras(**{ADVANTAGES: np.ones(len(tree.tokens[1]), np.float32)})
        uids = [episode.uid for episode in tree.episodes]
        return Group(
            group_uid=tree.group_uid, index=index, uids=uids, versions=[version] * len(uids), columns=encode_tree(tree)
        )

    def tree(
        self,
        row: DataRow,
        *,
        where: str,
        uid: str,
        version: int,
        items: Sequence[MediaItem] = (),
        partners: Iterable[DataRow] = (),
    ) -> TokenTree:
        """Returns the token tree of a data row from a source with this kind of rows.

        ``where`` is the row's file and line, ``uid`` the group's uid, ``version`` the weight version of the trained
        rows, and ``items`` are the encoded media of `sources`. Pairs have two episodes, first the chosen, then the
        rejected; their rewards are 1 and 0. A labelled row has two episodes. The reward of the first is the label. The
        second has the answer of the first of ``partners`` with another prompt and another answer that fits; it is not
        trained, and its reward is 0. The reward of a demonstration is 1. Raises `BadRow` for a row that cannot be
        trained.
        """
        turns = self._turns(row, where=where, items=items)
        rewards = [1.0, 0.0][: len(turns)]
        if self._kind == "labels":
            turns.append(self._mismatched(row, turns[0], partners, where=where, items=items))
            rewards = [float(row[LABEL]), 0.0]
        tree = build_tree(
            uid,
            [
                EpisodeRecord(
                    uid=sample_uid(uid, number),
                    turns=[
                        PlayedTurn(
                            prompt_ids=turn.prompt_ids, response=_response(turn, number, version), media=turn.media
                        )
                        for turn in its
                    ],
                    ended="stop",
                    output=RewardOutput(reward=reward, exact=reward == 1.0),
                )
                for number, (its, reward) in enumerate(zip(turns, rewards, strict=True))
            ],
        )
        if self._kind != "labels":
            return tree
        loss_mask = tree.loss_mask.copy()
        for turn in tree.episodes[1].turns:
            loss_mask[turn.start : turn.end] = False
        return tree.with_loss_mask(loss_mask)

    def _mismatched(
        self,
        row: DataRow,
        own: Sequence[TrainedTurn],
        partners: Iterable[DataRow],
        *,
        where: str,
        items: Sequence[MediaItem],
    ) -> list[TrainedTurn]:
        """Returns the prompt of a labelled row with the answer of its partner."""
        prompt = row["prompt"]
        for partner in partners:
            if partner["prompt"] == prompt:
                continue
            answer = partner[MESSAGES][len(partner["prompt"])]
            try:
                (turns,) = self._turns({**row, MESSAGES: [*prompt, answer]}, where=where, items=items)
            except BadRow:  # too long after this prompt, for example
                continue
            if turns[0].answer_ids != own[0].answer_ids:
                return turns
        raise BadRow.because(
            "no_partner",
            f"{where}: no row with another prompt and another answer fits after its prompt, and the KL estimate needs "
            "one. Add rows with other prompts, or raise engine.context_length.",
        )

    def _turns(self, row: DataRow, *, where: str, items: Sequence[MediaItem]) -> list[list[TrainedTurn]]:
        """Returns the trained turns of each episode."""
        try:
            if self._kind == "demonstrations" and TEXT in row:
                found = [[self._of_text(row[TEXT])]]
            else:
                found = [
                    self._of_messages(row, *talk, where=where, items=items) for talk in _conversations(row, self._kind)
                ]
        except TextTooLong as error:
            raise self._too_long(where, error.tokens) from error
        for turns in found:
            if (count := max(len(turn.prompt_ids) + len(turn.answer_ids) for turn in turns)) > self._max_tokens:
                raise self._too_long(where, count)
            for turn in turns:
                if self._banned and (banned := self._banned.intersection(turn.answer_ids)):
                    names = ", ".join(self._tokenizer.token_text(token) for token in sorted(banned))
                    raise BadRow.because(
                        "banned_token",
                        f"{where}: a trained text has {names}, which rollout.banned_token_ids excludes. Leave such "
                        "rows out, or take the tokens off rollout.banned_token_ids.",
                    )
        if len(found) == 2 and _ids(found[0]) == _ids(found[1]):
            raise BadRow.because("identical", f"{where}: {CHOSEN} and {REJECTED} have the same tokens.")
        return found

    def _of_messages(
        self, row: DataRow, messages: Messages, numbers: Sequence[int], *, where: str, items: Sequence[MediaItem]
    ) -> list[TrainedTurn]:
        if not numbers:
            raise BadRow.because("no_answer", f"{where}: no message of the assistant follows another message.")
        sources = media_sources(messages[: numbers[-1]])
        if len(sources) != len(items):
            what = f"{where}: it has {len(sources)} items of media, and {len(items)} were encoded"
            raise MediaError(sources[0].kind, "placeholder_count", what) if sources else ValueError(what)
        try:
            return self._conversations.turns(
                messages, numbers, tools=row.get(TOOLS), items=items, most_tokens=self._max_tokens
            )
        except TextTooLong:
            raise
        except ValueError as error:
            raise BadRow.because("template", f"{where}: {error}.") from error

    def _of_text(self, text: str) -> TrainedTurn:
        """Returns a plain text as one turn. Its first token has no prediction, so it is not trained."""
        self._tokenizer.short_enough(text, self._max_tokens)
        first, *rest = self._tokenizer.encode_document(text)
        return TrainedTurn(prompt_ids=[first], answer_ids=rest, media=[])

    def _too_long(self, where: str, count: int) -> BadRow:
        return BadRow(TOO_LONG, f"{where}: it has {count} tokens, and at most {self._max_tokens} are trained in a row.")


def _conversations(row: DataRow, kind: Offline) -> list[tuple[Messages, list[int]]]:
    """Returns the conversation of each episode, and the numbers of its trained messages."""
    if kind == "pairs":
        chosen, rejected = row[CHOSEN], row[REJECTED]
        first = next(number for number, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1])
        return [(messages, _answers(messages, first)) for messages in (chosen, rejected)]
    if kind == "labels":
        return [(row[MESSAGES], [len(row["prompt"])])]
    if MESSAGES in row:
        return [(row[MESSAGES], _answers(row[MESSAGES], 1))]
    if TEXT in row:
        return []
    prompt = row["prompt"]
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [([*asked, {"role": ASSISTANT, "content": row["answer"]}], [len(asked)])]


def _answers(messages: Messages, first: int) -> list[int]:
    """Returns the numbers of the assistant's messages from number ``first`` on, without messages of weight 0."""
    return [
        number
        for number, message in enumerate(messages)
        if number >= first and message["role"] == ASSISTANT and message.get("weight") != 0
    ]


def _ids(turns: Sequence[TrainedTurn]) -> list[tuple[list[int], list[int]]]:
    return [(turn.prompt_ids, turn.answer_ids) for turn in turns]


def _response(turn: TrainedTurn, number: int, version: int) -> Generated:
    count = len(turn.answer_ids)
    return Generated(
        rid="",
        prompt=0,
        sample=number,
        output_ids=np.array(turn.answer_ids, dtype=np.int32),
        logprobs=np.zeros(count, dtype=np.float32),
        versions=np.full(count, version, dtype=np.int32),
        finish_reason="stop",
        engine=OF_DATA,
    )
