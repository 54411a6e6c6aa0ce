"""Writes generated and trained samples to the event log and the folder ``samples`` of the run, and reads them.

A background thread writes; callers only append references to a queue. If the disk is too slow or full, samples are left
out and counted.

The metrics are in records of the event log (`MadeRecord`, `TrainedRecord`). The tokens are in files
``samples/WORKER.PART.tokens``. Such a file is a sequence of msgpack maps and only grows. Each record has the file name,
offset and size of its tokens.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from relax_core.contracts import columns as c
from relax_core.contracts.bus import Group
from relax_core.contracts.columns import decode_episodes, decode_tree, encode_column, payload_bytes
from relax_core.contracts.tree import Episode, TokenTree
from relax_core.contracts.untrusted_files import NotPlain, open_plain, read_plain_file
from relax_core.observe.event_log import (
    SAMPLES,
    AppendFile,
    EventFile,
    MadeRecord,
    MadeSample,
    TokensAt,
    TrainedRecord,
)

SAMPLES_FOLDER = "samples"
TOKENIZER_FOLDER = "tokenizer"  # subfolder with the files of the run's tokenizer
PICTURES_FOLDER = "pictures"  # subfolder with small pictures of media items, DIGEST.jpg
PLAYED_FOLDER = "media"  # subfolder with files of sounds and videos, DIGEST
TOKENS_SUFFIX = ".tokens"

# Logged columns of a group. Routed experts and kept sets are not logged, because they are the largest columns.
TOKEN_COLUMNS = (
    *(c.TOKEN_IDS, c.END, c.LOSS_MASK, c.LOGPROBS, c.VERSIONS, c.EPISODES, c.MEDIA),
    *(c.ADVANTAGES, c.OLD_LOGPROBS, c.REFERENCE_LOGPROBS, c.VALUES),
)


class TrainedTokens(msgspec.Struct, frozen=True):
    """Holds the trainer's values of each sampled token. The samples are in the order of the record's ``uids``.

    ``advantages`` and ``logprobs`` are float32, ``trained`` is bool. ``logprobs`` come from the forward pass that
    computed the gradient. The array is empty if the samples were counted without a forward pass.
    """

    advantages: bytes
    logprobs: bytes
    trained: bytes


def token_columns(tree: TokenTree) -> dict[str, bytes]:
    """Returns the `TOKEN_COLUMNS` of a tree that is not put on the bus."""
    arrays = {
        c.TOKEN_IDS: tree.token_ids,
        c.END: tree.end,
        c.LOSS_MASK: tree.loss_mask,
        c.LOGPROBS: tree.logprobs,
        c.VERSIONS: tree.versions,
    } | {name: extra for name, extra in tree.extras.items() if name in TOKEN_COLUMNS}
    columns = {name: encode_column(name, np.asarray(array)) for name, array in arrays.items()}
    encode = msgspec.msgpack.encode
    return columns | {c.EPISODES: encode(tree.episodes), c.MEDIA: encode(tree.media)}


log = logging.getLogger(__name__)
GATHER_S = 0.2  # the thread collects samples for this time and writes them as one batch
MAX_WAITING_BYTES = 256 * 2**20
PARTS = 16  # approximate number of token files per worker
ROW_BYTES = 17  # bytes of a row: token id, end, mask, log-prob and version
MAX_WHY = 4000  # characters
Tokens = TypeVar("Tokens")
# A function that makes a record from the location of its tokens, and the tokens.
Made = tuple[Callable[[TokensAt], MadeRecord | TrainedRecord], dict[str, bytes] | TrainedTokens]


class SampleLog:
    """Logs the samples of one worker.

    Of every ``every`` consecutive groups, the first ``first`` groups are logged. The token files take at most about
    ``max_bytes``; the oldest files are removed first. All methods except `close` return at once. Only one thread may
    call them.
    """

    def __init__(self, run_dir: Path, *, worker: str, first: int, every: int, max_bytes: int, attempt: int = 0) -> None:
        self._first, self._every = first, every
        self._events = EventFile(run_dir, SAMPLES + worker, attempt=attempt)
        self._tokens = TokenFiles(run_dir / SAMPLES_FOLDER, worker=worker, max_bytes=max_bytes)
        self._queue: deque[tuple[int, Callable[[], list[Made]]]] = deque()
        self._put_bytes = self._done_bytes = 0  # each counter has one writer, so no lock is needed
        self.left_out = 0  # number of groups that were not written
        self._seen_step, self._seen = -1, set[str]()
        self._pending = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_forever, name=f"samples-{worker}", daemon=True)
        self._thread.start()

    def keeps(self, index: int) -> bool:
        """Returns whether the group with this index is logged."""
        return index % self._every < self._first

    def put(self, group: Group) -> None:
        """Logs a group that is put on the bus."""
        if self.keeps(group.index):
            now = time.time()
            self._enqueue(payload_bytes(group.columns), lambda: [_of_put(group, now)])

    def lost(self, tree: TokenTree) -> None:
        """Logs samples that are not put on the bus."""
        if self.keeps(group_index(tree.group_uid)):
            now = time.time()
            self._enqueue(ROW_BYTES * tree.rows, lambda: [_of_lost(tree, now)])

    def trained(self, step: int, groups: Sequence[TokenTree], logprobs: np.ndarray | None) -> None:
        """Logs the trainer's values of groups or parts of groups at a train step.

        ``logprobs`` is float32 ``[tokens]`` over all groups, or None if the groups were counted without a forward pass.
        If a later epoch of the same step trains a sample again, the sample is logged only once.
        """
        now = time.time()
        nbytes = 12 * sum(len(group.tokens[1]) for group in groups)
        self._enqueue(nbytes, lambda: self._of_trained(step, groups, logprobs, now))

    def close(self, *, timeout_s: float) -> None:
        """Writes the waiting samples and ends the thread."""
        self._closing.set()
        self._pending.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("samples: the files in %s were not written within %.0f s", self._tokens.folder, timeout_s)

    def _enqueue(self, nbytes: int, make: Callable[[], list[Made]]) -> None:
        if self._put_bytes - self._done_bytes > MAX_WAITING_BYTES or not self._thread.is_alive():
            self.left_out += 1
            return
        self._put_bytes += nbytes
        self._queue.append((nbytes, make))
        if not self._pending.is_set():
            self._pending.set()

    def _of_trained(
        self, step: int, groups: Sequence[TokenTree], logprobs: np.ndarray | None, now: float
    ) -> list[Made]:
        if step != self._seen_step:
            self._seen_step, self._seen = step, set()
        made: list[Made] = []
        first = 0
        for group in groups:
            behind = first + len(group.tokens[1])
            uids = [episode.uid for episode in group.episodes]
            if self.keeps(group_index(group.group_uid)) and not self._seen.issuperset(uids):
                own = None if logprobs is None else logprobs[first:behind]
                made.append(_of_part(group, uids, own, step=step, now=now))
                self._seen.update(uids)
            first = behind
        return made

    def _write_forever(self) -> None:
        warned = False
        while True:
            last = self._closing.is_set()
            batch = [self._queue.popleft() for _ in range(len(self._queue))]
            made = [record for _, make in batch for record in make()]
            try:
                self._write(made)
                warned = False
            except OSError as error:
                self.left_out += len(made)
                if not warned:
                    log.warning("samples: %s. The run goes on; the dashboard lacks these samples.", error)
                warned = True
            self._done_bytes += sum(nbytes for nbytes, _ in batch)
            if last:
                self._tokens.close()
                return
            self._pending.wait()
            self._closing.wait(GATHER_S)
            self._pending.clear()

    def _write(self, made: Sequence[Made]) -> None:
        """Writes the tokens before the records, because the tokens of a record must exist. Raises OSError."""
        if made:
            places = self._tokens.append([msgspec.msgpack.encode(tokens) for _, tokens in made])
            self.left_out += self._events.append(*(record(at) for (record, _), at in zip(made, places, strict=True)))


class TokenFiles:
    """Appends the tokens of one worker to files of about equal size, and removes the oldest files."""

    def __init__(self, folder: Path, *, worker: str, max_bytes: int) -> None:
        self.folder, self._worker = folder, worker
        self._part_bytes, self._max_bytes = max(1, max_bytes // PARTS), max_bytes
        self._file: AppendFile | None = None
        self._name, self._part = "", -1

    def append(self, payloads: Sequence[bytes]) -> list[TokensAt]:
        """Appends payloads and returns their locations. Raises OSError if the file cannot be written."""
        file = self._file = self._file or self._open()
        places, offset = [], file.size
        for payload in payloads:
            places.append(TokensAt(self._name, offset, len(payload)))
            offset += len(payload)
        file.append(b"".join(payloads))
        if file.size >= self._part_bytes:
            self.close()
        return places

    def close(self) -> None:
        """Closes the open file; the next tokens go into a new file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> AppendFile:
        self.folder.mkdir(parents=True, exist_ok=True)
        parts = self._parts()
        self._part = max(self._part, int(parts[-1].name.split(".")[1]) if parts else -1) + 1
        self._remove_oldest(parts)
        self._name = f"{self._worker}.{self._part:08d}{TOKENS_SUFFIX}"
        return AppendFile(self.folder / self._name, lines=False)

    def _parts(self) -> list[Path]:
        found = self.folder.glob(f"{self._worker}.*{TOKENS_SUFFIX}")
        return sorted(path for path in found if _OWN_NAME.fullmatch(path.name))

    def _remove_oldest(self, parts: list[Path]) -> None:
        """Removes the oldest token files, also files of earlier starts, until one more file fits into the limit."""
        sizes = [path.stat().st_size for path in parts]
        while parts and sum(sizes) > self._max_bytes - self._part_bytes:
            parts.pop(0).unlink(missing_ok=True)
            sizes.pop(0)


def _of_put(group: Group, now: float) -> Made:
    columns = {name: group.columns[name] for name in TOKEN_COLUMNS if name in group.columns}
    episodes = decode_episodes(group.columns[c.EPISODES])
    samples = [_made_sample(episode, version) for episode, version in zip(episodes, group.versions, strict=True)]
    return partial(_made, group.group_uid, now, samples), columns


def _of_lost(tree: TokenTree, now: float) -> Made:
    samples = [_made_sample(episode, None) for episode in tree.episodes]
    return partial(_made, tree.group_uid, now, samples), token_columns(tree)


def _made(group_uid: str, now: float, samples: list[MadeSample], at: TokensAt) -> MadeRecord:
    return MadeRecord(group_uid=group_uid, time_s=now, samples=samples, tokens=at)


def _made_sample(episode: Episode, version: int | None) -> MadeSample:
    return MadeSample(
        uid=episode.uid,
        reward=episode.reward,
        length=sum(turn.end - turn.start for turn in episode.turns),
        ended=episode.ended,
        engine=episode.turns[0].engine if episode.turns else "",
        version=version,
        turns=len(episode.turns),
        parts=episode.parts,
        why=episode.why[:MAX_WHY],
    )


def _of_part(group: TokenTree, uids: list[str], logprobs: np.ndarray | None, *, step: int, now: float) -> Made:
    episodes, rows = group.tokens
    trained = group.loss_mask[rows]
    record = partial(
        TrainedRecord,
        group_uid=group.group_uid,
        step=step,
        time_s=now,
        uids=uids,
        lengths=group.lengths.tolist(),
        trained=np.bincount(episodes[trained], minlength=len(uids)).tolist(),
        versions=group.oldest_versions(trained=True).tolist(),
    )
    advantages = group.of_tokens(c.ADVANTAGES)
    assert advantages is not None, "the trainer leases groups with advantages"
    computed = b"" if logprobs is None else logprobs.astype("<f4").tobytes()
    tokens = TrainedTokens(advantages.astype("<f4").tobytes(), computed, trained.astype("|b1").tobytes())
    return lambda at: record(tokens=at), tokens


def group_index(uid: str) -> int:
    """Returns the group's index, which its uid contains (`relax_core.contracts.tree.group_uid`)."""
    return int(uid[1:])


# -- The reader --------------------------------------------------------------------------------------------------------
_OWN_NAME = re.compile(r"[\w-]+\.\d{8,12}\.tokens")
MAX_TOKENS_BYTES = 128 * 2**20  # limit of one group's tokens in bytes
MAX_TOKENIZER_BYTES, MAX_TOKEN, MAX_DECODER_BYTES = 64 * 2**20, 2048, 4096
REPLACEMENT = "\ufffd"  # the decoder's output for an incomplete character
_made_tokens = msgspec.msgpack.Decoder(dict[str, bytes])  # the columns of a tree
_trained_tokens = msgspec.msgpack.Decoder(TrainedTokens)


class TokensRemoved(Exception):
    """The tokens of a sample no longer exist, because the run keeps the newest 2 GiB."""


def read_made_tree(run_dir: Path, group_uid: str, at: TokensAt) -> TokenTree:
    """Returns the tree of a generated group. Raises TokensRemoved if the token file was removed."""
    columns = _decoded(_made_tokens, run_dir, at)
    return decode_tree(Group(group_uid=group_uid, index=0, uids=[], versions=[], columns=columns))


@dataclass(frozen=True, kw_only=True)
class TrainedPart:
    """Holds the trainer's values of a sample's sampled tokens. Each array is ``[tokens]``."""

    advantages: np.ndarray  # float32
    logprobs: np.ndarray  # float32; empty if the sample was counted without a forward pass
    trained: np.ndarray  # bool


def read_trained(run_dir: Path, at: TokensAt, *, first: int, count: int) -> TrainedPart:
    """Returns ``count`` tokens of a trained record, from ``first`` on. Raises TokensRemoved if the file was removed."""
    tokens = _decoded(_trained_tokens, run_dir, at)
    own = slice(first, first + count)
    return TrainedPart(
        advantages=np.frombuffer(tokens.advantages, "<f4")[own],
        logprobs=np.frombuffer(tokens.logprobs, "<f4")[own],
        trained=np.frombuffer(tokens.trained, "|b1")[own],
    )


def _decoded(decoder: msgspec.msgpack.Decoder[Tokens], run_dir: Path, at: TokensAt) -> Tokens:
    if not _OWN_NAME.fullmatch(at.file):
        raise TokensRemoved(f"{at.file!r} is not a name of a file of samples")
    if at.size > MAX_TOKENS_BYTES:
        raise TokensRemoved(f"{at.file}: tokens of {at.size} bytes are not read; at most {MAX_TOKENS_BYTES} are")
    try:
        with open_plain(run_dir / SAMPLES_FOLDER / at.file) as file:
            file.seek(at.offset)
            data = file.read(at.size)
    except FileNotFoundError as error:
        raise TokensRemoved(f"{at.file} no longer exists: the run keeps the newest 2 GiB") from error
    except NotPlain as error:
        raise TokensRemoved(str(error)) from error
    if len(data) < at.size:
        raise TokensRemoved(f"{at.file} ends before the sample's tokens: the copy of the run's folder is not whole")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{at.file}: the tokens at byte {at.offset} are damaged: {error}") from error


class SampleText:
    """Decodes token ids with the tokenizer that the run saved next to its samples.

    Raises FileNotFoundError if the run saved no tokenizer, and ValueError if its files cannot be read.
    """

    def __init__(self, run_dir: Path) -> None:
        from tokenizers import Tokenizer

        path = run_dir / SAMPLES_FOLDER / TOKENIZER_FOLDER / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_buffer(_for_decoding(read_plain_file(path, max_bytes=MAX_TOKENIZER_BYTES)))
        except FileNotFoundError:
            raise
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path} cannot be read: {error}") from error
        self._decode: Callable[[list[int]], str] = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, with special tokens."""
        return self._decode([int(token_id) for token_id in ids])

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the text of each token. The joined texts are approximately the whole text.

        If several tokens form one character, the last token has the character and the tokens before have "".
        """
        found: list[str] = []
        open_ids: list[int] = []
        for token_id in ids:
            open_ids.append(int(token_id))
            text = self._decode(open_ids)
            whole = not text.endswith(REPLACEMENT) or len(open_ids) >= MAX_BYTES_OF_A_CHARACTER
            found.append(text if whole else "")
            if whole:
                open_ids = []
        return found


def _for_decoding(data: bytes) -> bytes:
    """Returns the parts of a tokenizer.json that decoding needs. Raises ValueError if they could be slow or large."""
    try:
        whole = msgspec.json.decode(data, type=_TokenizerFile)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if b'"Regex"' in bytes(whole.decoder):
        raise ValueError("its decoder has a regular expression, which may never end")
    vocabulary = msgspec.json.decode(whole.model, type=_Vocabulary).vocab
    texts = vocabulary if isinstance(vocabulary, dict) else (entry[0] for entry in vocabulary)
    added = msgspec.json.decode(whole.added_tokens, type=list[_AddedToken])
    longest = max(map(len, [*texts, *(token.content for token in added)]), default=0)
    if longest > MAX_TOKEN or len(whole.decoder) > MAX_DECODER_BYTES:
        raise ValueError(f"it has a token of {longest} characters, or a decoder of {len(whole.decoder)} bytes")
    return msgspec.json.encode(whole)


class _TokenizerFile(msgspec.Struct):
    model: msgspec.Raw
    version: str = "1.0"
    added_tokens: msgspec.Raw = msgspec.Raw(b"[]")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _AddedToken(msgspec.Struct):
    content: str


MAX_BYTES_OF_A_CHARACTER = 4
