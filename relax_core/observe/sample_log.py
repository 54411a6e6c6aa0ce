"""Writes the samples that a process makes or trains to files in the run's folder ``samples``, and reads them.

A thread writes; the caller only appends a reference to a queue. If the disk is slow or full, samples are left out and
counted.

Each process that makes or trains samples writes files of its own. ``NAME.START.msgpack`` has the numbers of its groups,
where START counts the starts of the process. ``NAME.START.tokens-PART.msgpack`` has their tokens; the numbers say where
the tokens of a group stand. A file is a sequence of msgpack byte strings, each of which holds one record as a msgpack
map. A file only grows. Its last frame may be half-written if its writer was killed.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from relax_core.contracts import columns as c
from relax_core.contracts.bus import Group
from relax_core.contracts.columns import decode_tree, encode_column, payload_bytes
from relax_core.contracts.foreign_files import NotPlain, open_plain, read_whole
from relax_core.contracts.tree import TokenTree
from relax_core.observe.event_log import AppendFile

SAMPLES_FOLDER = "samples"
TOKENIZER_FOLDER = "tokenizer"  # in the folder of samples: the files of the run's tokenizer
PICTURES_FOLDER = "pictures"  # in the folder of samples: small pictures of items, DIGEST.jpg
PLAYED_FOLDER = "media"  # in the folder of samples: files of sounds and videos, DIGEST
NUMBERS_SUFFIX, TOKENS_MARK = ".msgpack", ".tokens-"

# The columns of a group that are kept. Routed experts and kept sets are larger than all else, so they are left out.
TOKEN_COLUMNS = (
    *(c.TOKEN_IDS, c.END, c.LOSS_MASK, c.LOGPROBS, c.VERSIONS, c.MEDIA),
    *(c.ADVANTAGES, c.OLD_LOGPROBS, c.REFERENCE_LOGPROBS, c.VALUES),
)
_HEAD, _HEAD_BYTES = b"\xc6", 5  # msgpack's mark of a byte string with a length of four bytes


class TokensAt(msgspec.Struct, frozen=True, array_like=True):
    """Says where the tokens of a record stand: the name of a file beside it, and the frame's offset and its bytes."""

    file: str
    offset: int
    size: int


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True, tag="attempt", tag_field="kind"):
    """Is the first record of a file.

    ``attempt`` names the services that were started together; they have done ``start_step`` train steps then. What an
    earlier attempt did after that step is undone.
    """

    worker: str
    attempt: str
    start_step: int
    time_s: float


class MadeRecord(msgspec.Struct, frozen=True, kw_only=True, tag="made", tag_field="kind", omit_defaults=True):
    """Holds the numbers of samples that the rollout made.

    ``episodes`` is the column of the same name. ``versions`` has the version of the oldest trained token of each; it is
    empty for samples that were dropped. ``dropped`` maps their uids to the reasons; a group that was put on the bus has
    none.
    """

    group_uid: str
    time_s: float
    episodes: msgspec.Raw
    versions: list[int] = []
    dropped: dict[str, str] = {}
    tokens: TokensAt | None = None


class TrainedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="trained", tag_field="kind", omit_defaults=True):
    """Holds the numbers of samples of one group that a rank of the trainer trained at train step ``step``.

    ``lengths`` counts the sampled tokens of each sample, and ``trained`` those that no mask takes out. ``versions`` has
    the version of the oldest trained token of each.
    """

    group_uid: str
    step: int
    time_s: float
    uids: list[str]
    lengths: list[int]
    trained: list[int]
    versions: list[int]
    tokens: TokensAt | None = None


Numbers = AttemptRecord | MadeRecord | TrainedRecord


class MadeTokens(msgspec.Struct, frozen=True):
    """Holds the columns of a group's tree, as `relax_core.contracts.columns` encodes them."""

    columns: dict[str, bytes]


class TrainedTokens(msgspec.Struct, frozen=True):
    """Holds what the trainer knows of each sampled token, sample by sample, in the order of the record's ``uids``.

    ``advantages`` and ``logprobs`` are float32, ``trained`` is bool. The log-probs are those of the forward pass whose
    gradient was used; they are empty if the samples were counted without a pass.
    """

    advantages: bytes
    logprobs: bytes
    trained: bytes


class Frame(NamedTuple):
    """Is one record of a file: its bytes, and the offset and the size of the frame around them."""

    payload: bytes
    offset: int
    size: int


def framed(payload: bytes) -> bytes:
    """Returns the payload as a msgpack byte string."""
    return _HEAD + len(payload).to_bytes(4, "big") + payload


def split_frames(data: bytes, *, offset: int) -> list[Frame]:
    """Returns the whole frames at the start of ``data``, which stands at ``offset`` in its file.

    A half-written frame at the end is left out. Raises ValueError if a frame begins with something else.
    """
    found, at = [], 0
    while len(data) - at >= _HEAD_BYTES:
        if data[at : at + 1] != _HEAD:
            raise ValueError(f"no record of samples begins at byte {offset + at}")
        size = _HEAD_BYTES + int.from_bytes(data[at + 1 : at + _HEAD_BYTES], "big")
        if at + size > len(data):
            break
        found.append(Frame(data[at + _HEAD_BYTES : at + size], offset + at, size))
        at += size
    return found


def check_frame(data: bytes, *, offset: int, most: int) -> None:
    """Raises ValueError if the frame at the start of ``data`` is longer than ``most`` bytes."""
    size = int.from_bytes(data[1:_HEAD_BYTES], "big")
    if size > most:
        raise ValueError(f"the record at byte {offset} has {size} bytes; at most {most} are read")


def token_columns(tree: TokenTree) -> dict[str, bytes]:
    """Returns the columns of `TOKEN_COLUMNS` of a tree that the bus does not get."""
    arrays = {
        c.TOKEN_IDS: tree.token_ids,
        c.END: tree.end,
        c.LOSS_MASK: tree.loss_mask,
        c.LOGPROBS: tree.logprobs,
        c.VERSIONS: tree.versions,
    } | {name: one for name, one in tree.extras.items() if name in TOKEN_COLUMNS}
    columns = {name: encode_column(name, np.asarray(one)) for name, one in arrays.items()}
    return columns | {c.MEDIA: msgspec.msgpack.encode(tree.media)}


log = logging.getLogger(__name__)
GATHER_S = 0.2  # the thread gathers samples for this long and writes them as one batch
MOST_WAITING_BYTES = 256 * 2**20
PARTS = 16  # the tokens of a worker lie in about so many files, of which the oldest is removed first
ROW_BYTES = 17  # of a row's token id, end, mask, log-prob and version

Made = tuple[MadeRecord | TrainedRecord, MadeTokens | TrainedTokens]


class SampleLog:
    """Appends samples to the files of one worker in ``folder``.

    ``first`` of every ``every`` neighbouring groups are kept. The tokens take at most about ``max_bytes``; the oldest
    ones are removed first. All methods but `close` return at once, and they may be called from one thread only.
    """

    def __init__(
        self, folder: Path, *, worker: str, attempt: str, start_step: int, first: int, every: int, max_bytes: int
    ) -> None:
        self._first, self._every = first, every
        self._files = SampleFiles(folder, worker=worker, max_bytes=max_bytes)
        self._started = AttemptRecord(worker=worker, attempt=attempt, start_step=start_step, time_s=time.time())
        self._queue: deque[tuple[int, Callable[[], list[Made]]]] = deque()
        self._put_bytes = self._done_bytes = 0  # each has one writer, so that no lock is needed
        self.left_out = 0  # the number of groups that are in no file
        self._seen_step, self._seen = -1, set[str]()
        self._pending = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_forever, name=f"samples-{worker}", daemon=True)
        self._thread.start()

    def keeps(self, index: int) -> bool:
        """Returns whether the group with this index is kept."""
        return index % self._every < self._first

    def put(self, group: Group) -> None:
        """Keeps a group that is put on the bus."""
        if self.keeps(group.index):
            now = time.time()
            self._enqueue(payload_bytes(group.columns), lambda: [_of_put(group, now)])

    def lost(self, tree: TokenTree, reasons: Mapping[str, str]) -> None:
        """Keeps samples that the bus does not get: their tree, and for each uid why it is dropped."""
        if self.keeps(group_index(tree.group_uid)):
            now = time.time()
            self._enqueue(ROW_BYTES * tree.rows, lambda: [_of_lost(tree, dict(reasons), now)])

    def trained(self, step: int, groups: Sequence[TokenTree], logprobs: np.ndarray | None) -> None:
        """Keeps what the trainer computed of groups, or of parts of groups, at a train step.

        ``logprobs`` is float32 ``[tokens]`` over all groups, or None if they were counted without a pass. A sample that
        is trained again in the same step, in a later epoch, is kept once.
        """
        now = time.time()
        nbytes = 12 * sum(len(group.tokens[1]) for group in groups)
        self._enqueue(nbytes, lambda: self._of_trained(step, groups, logprobs, now))

    def close(self, *, timeout_s: float) -> None:
        """Writes what waits and ends the thread."""
        self._closing.set()
        self._pending.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("samples: the files in %s were not written within %.0f s", self._files.folder, timeout_s)

    def _enqueue(self, nbytes: int, make: Callable[[], list[Made]]) -> None:
        if self._put_bytes - self._done_bytes > MOST_WAITING_BYTES or not self._thread.is_alive():
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
            uids = [one.uid for one in group.episodes]
            if self.keeps(group_index(group.group_uid)) and not self._seen.issuperset(uids):
                own = None if logprobs is None else logprobs[first:behind]
                made.append(_of_part(group, uids, own, step=step, now=now))
                self._seen.update(uids)
            first = behind
        return made

    def _write_forever(self) -> None:
        told = False
        while True:
            last = self._closing.is_set()
            batch = [self._queue.popleft() for _ in range(len(self._queue))]
            made = [one for _, make in batch for one in make()]
            try:
                self._files.append(made, self._started)
                told = False
            except OSError as error:
                self.left_out += len(made)
                if not told:
                    log.warning("samples: %s. The run goes on; the dashboard lacks these samples.", error)
                told = True
            self._done_bytes += sum(nbytes for nbytes, _ in batch)
            if last:
                self._files.close()
                return
            self._pending.wait()
            self._closing.wait(GATHER_S)
            self._pending.clear()


class SampleFiles:
    """Holds the open files of one worker and removes the oldest files of tokens."""

    def __init__(self, folder: Path, *, worker: str, max_bytes: int) -> None:
        self.folder, self._worker = folder, worker
        self._part_bytes, self._max_bytes = max(1, max_bytes // PARTS), max_bytes
        self._numbers: AppendFile | None = None
        self._tokens: AppendFile | None = None
        self._stem, self._part = "", 0

    def append(self, made: Sequence[Made], started: AttemptRecord) -> None:
        """Appends a batch, the tokens first. Raises OSError if a file cannot be written."""
        encode = msgspec.msgpack.encode
        numbers = self._open_numbers(started)
        if not made:
            return
        tokens = self._open_tokens()
        name, offset = f"{self._stem}{TOKENS_MARK}{self._part:04d}{NUMBERS_SUFFIX}", tokens.size
        frames, lines = [], []
        for record, its_tokens in made:
            frame = framed(encode(its_tokens))
            at = TokensAt(name, offset, len(frame))
            frames.append(frame)
            lines.append(framed(encode(msgspec.structs.replace(record, tokens=at))))
            offset += len(frame)
        tokens.append(b"".join(frames))
        numbers.append(b"".join(lines))
        if tokens.size >= self._part_bytes:
            tokens.close()
            self._tokens, self._part = None, self._part + 1

    def close(self) -> None:
        """Closes the files."""
        for file in (self._numbers, self._tokens):
            if file is not None:
                file.close()

    def _open_numbers(self, started: AttemptRecord) -> AppendFile:
        if self._numbers is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            starts = [int(path.name.split(".")[1]) for path in self.folder.glob(f"{self._worker}.*{NUMBERS_SUFFIX}")]
            self._stem = f"{self._worker}.{max(starts, default=-1) + 1:04d}"
            file = AppendFile(self.folder / f"{self._stem}{NUMBERS_SUFFIX}", lines=False)
            file.append(framed(msgspec.msgpack.encode(started)))
            self._numbers = file
        return self._numbers

    def _open_tokens(self) -> AppendFile:
        if self._tokens is None:
            name = f"{self._stem}{TOKENS_MARK}{self._part:04d}{NUMBERS_SUFFIX}"
            self._remove_oldest()
            self._tokens = AppendFile(self.folder / name, lines=False)
        return self._tokens

    def _remove_oldest(self) -> None:
        """Removes the oldest tokens, also those of earlier starts, until one more file of them has room."""
        parts = sorted(self.folder.glob(f"{self._worker}.*{TOKENS_MARK}*{NUMBERS_SUFFIX}"))
        sizes = [path.stat().st_size for path in parts]
        while parts and sum(sizes) > self._max_bytes - self._part_bytes:
            parts.pop(0).unlink(missing_ok=True)
            sizes.pop(0)


def _of_put(group: Group, now: float) -> Made:
    columns = {name: group.columns[name] for name in TOKEN_COLUMNS if name in group.columns}
    episodes = msgspec.Raw(group.columns[c.EPISODES])
    record = MadeRecord(group_uid=group.group_uid, time_s=now, episodes=episodes, versions=group.versions)
    return record, MadeTokens(columns)


def _of_lost(tree: TokenTree, reasons: dict[str, str], now: float) -> Made:
    episodes = msgspec.Raw(msgspec.msgpack.encode(tree.episodes))
    record = MadeRecord(group_uid=tree.group_uid, time_s=now, episodes=episodes, dropped=reasons)
    return record, MadeTokens(token_columns(tree))


def _of_part(group: TokenTree, uids: list[str], logprobs: np.ndarray | None, *, step: int, now: float) -> Made:
    episodes, rows = group.tokens
    trained = group.loss_mask[rows]
    record = TrainedRecord(
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
    return record, TrainedTokens(advantages.astype("<f4").tobytes(), computed, trained.astype("|b1").tobytes())


def group_index(uid: str) -> int:
    """Returns the index in a group's uid (`relax_core.contracts.tree.group_uid`)."""
    return int(uid[1:])


# -- The reader --------------------------------------------------------------------------------------------------------
_OWN_NAME = re.compile(r"[\w-]+\.\d+(\.tokens-\d+)?\.msgpack")
READ_BYTES = 16 * 2**20
MOST_FILES = 20_000  # entries of the folder of samples
MOST_NUMBERS_BYTES, MOST_TOKENS_BYTES = 8 * 2**20, 128 * 2**20  # of one frame
MOST_TOKENIZER_BYTES, MOST_TOKEN, MOST_DECODER_BYTES = 64 * 2**20, 2048, 4096
REPLACEMENT = "\ufffd"  # stands for bytes that are no character yet
_numbers = msgspec.msgpack.Decoder(Numbers)
_made = msgspec.msgpack.Decoder(MadeTokens)
_trained = msgspec.msgpack.Decoder(TrainedTokens)


class TokensRemoved(Exception):
    """The tokens of a sample are not there any more, because the run keeps the newest 2 GiB."""


def numbers_files(run_dir: Path) -> list[str]:
    """Returns the names of the files with numbers in a run's folder of samples, sorted; none without such a folder.

    Links, whatever is no plain file and other names are left out, and what lies behind the first `MOST_FILES` entries.
    """
    try:
        with os.scandir(run_dir / SAMPLES_FOLDER) as entries:
            return sorted(
                entry.name
                for entry in islice(entries, MOST_FILES)
                if entry.name.endswith(NUMBERS_SUFFIX)
                and TOKENS_MARK not in entry.name
                and _OWN_NAME.fullmatch(entry.name)
                and entry.is_file(follow_symlinks=False)
            )
    except OSError:
        return []


def read_frames(path: Path, offset: int, *, most_bytes: int = READ_BYTES) -> list[Frame]:
    """Returns the whole frames of a file from ``offset`` on, of at most about ``most_bytes`` unless one is larger.

    Raises ValueError for a file that holds something else.
    """
    with open_plain(path) as file:
        file.seek(offset)
        data = file.read(most_bytes)
        frames = split_frames(data, offset=offset)
        if len(data) == most_bytes:
            check_frame(data, offset=offset, most=MOST_NUMBERS_BYTES)
        while not frames and len(data) == most_bytes:  # one frame is larger
            most_bytes *= 2
            file.seek(offset)
            data = file.read(most_bytes)
            frames = split_frames(data, offset=offset)
    return frames


def decode_numbers(frame: Frame) -> Numbers:
    """Returns the record of a frame. Raises ValueError for one that this Relax does not know."""
    try:
        return _numbers.decode(frame.payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the record at byte {frame.offset} is of another Relax or damaged: {error}") from error


def read_numbers_at(run_dir: Path, at: TokensAt) -> Numbers:
    """Returns the record of the frame at ``at``, as `decode_numbers` does."""
    return decode_numbers(Frame(_payload(run_dir, at), at.offset, at.size))


def read_made_tree(run_dir: Path, record: MadeRecord) -> TokenTree:
    """Returns the tree of a record. Raises TokensRemoved if its tokens are not there any more."""
    assert record.tokens is not None, "every record in a file says where its tokens stand"
    columns = _made.decode(_payload(run_dir, record.tokens)).columns | {c.EPISODES: bytes(record.episodes)}
    return decode_tree(Group(group_uid=record.group_uid, index=0, uids=[], versions=record.versions, columns=columns))


@dataclass(frozen=True, kw_only=True)
class TrainedPart:
    """Holds what the trainer knows of a sample's sampled tokens, ``[tokens]`` each."""

    advantages: np.ndarray  # float32
    logprobs: np.ndarray  # float32; empty if the sample was counted without a pass
    trained: np.ndarray  # bool


def read_trained(run_dir: Path, at: TokensAt, *, first: int, count: int) -> TrainedPart:
    """Returns ``count`` tokens from ``first`` on of a trained record. Raises TokensRemoved as `read_made_tree` does."""
    tokens = _trained.decode(_payload(run_dir, at))
    own = slice(first, first + count)
    return TrainedPart(
        advantages=np.frombuffer(tokens.advantages, "<f4")[own],
        logprobs=np.frombuffer(tokens.logprobs, "<f4")[own],
        trained=np.frombuffer(tokens.trained, "|b1")[own],
    )


def _payload(run_dir: Path, at: TokensAt) -> bytes:
    if not _OWN_NAME.fullmatch(at.file):
        raise TokensRemoved(f"{at.file!r} is no name of a file of samples")
    if not 0 <= at.size <= MOST_TOKENS_BYTES or not 0 <= at.offset < 2**53:
        raise TokensRemoved(f"{at.file}: tokens of {at.size} bytes are not read; at most {MOST_TOKENS_BYTES} are")
    try:
        with open_plain(run_dir / SAMPLES_FOLDER / at.file) as file:
            file.seek(at.offset)
            data = file.read(at.size)
    except FileNotFoundError as error:
        raise TokensRemoved(f"{at.file} is not there any more: the run keeps the newest 2 GiB") from error
    except NotPlain as error:
        raise TokensRemoved(str(error)) from error
    frames = split_frames(data, offset=at.offset)
    if len(frames) != 1:
        raise TokensRemoved(f"{at.file} ends before the sample's tokens: the copy of the run's folder is not whole")
    return frames[0].payload


class SampleText:
    """Makes text of token ids with the tokenizer that the run kept beside its samples.

    Raises FileNotFoundError if there is none, and ValueError if it cannot be read.
    """

    def __init__(self, run_dir: Path) -> None:
        from tokenizers import Tokenizer

        path = run_dir / SAMPLES_FOLDER / TOKENIZER_FOLDER / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_buffer(_for_decoding(read_whole(path, most_bytes=MOST_TOKENIZER_BYTES)))
        except FileNotFoundError:
            raise
        except Exception as error:  # The library raises plain Exception.
            raise ValueError(f"{path} cannot be read: {error}") from error
        self._decode: Callable[[list[int]], str] = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, special tokens included."""
        return self._decode([int(one) for one in ids])

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the text of each token; joined they are about the whole text.

        If several tokens make one character, the last of them has it and those before are empty.
        """
        found: list[str] = []
        open_ids: list[int] = []
        for one in ids:
            open_ids.append(int(one))
            text = self._decode(open_ids)
            whole = not text.endswith(REPLACEMENT) or len(open_ids) >= MOST_BYTES_OF_A_CHARACTER
            found.append(text if whole else "")
            if whole:
                open_ids = []
        return found


def _for_decoding(data: bytes) -> bytes:
    """Returns the parts of a tokenizer.json that decode. Raises ValueError for what could take long or grow large."""
    try:
        whole = msgspec.json.decode(data, type=_TokenizerFile)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if b'"Regex"' in bytes(whole.decoder):
        raise ValueError("its decoder has a regular expression, which may take for ever")
    vocabulary = msgspec.json.decode(whole.model, type=_Vocabulary).vocab
    texts = vocabulary if isinstance(vocabulary, dict) else (entry[0] for entry in vocabulary)
    added = msgspec.json.decode(whole.added_tokens, type=list[_AddedToken])
    longest = max(map(len, [*texts, *(one.content for one in added)]), default=0)
    if longest > MOST_TOKEN or len(whole.decoder) > MOST_DECODER_BYTES:
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


MOST_BYTES_OF_A_CHARACTER = 4
