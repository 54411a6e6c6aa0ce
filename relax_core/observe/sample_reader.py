"""Reads the files of a run's samples, also while they are written and after the run's folder was copied elsewhere."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from relax_core.contracts import columns as c
from relax_core.contracts.bus import Group
from relax_core.contracts.columns import decode_episodes, decode_tree
from relax_core.contracts.foreign_files import NotPlain, open_plain, read_whole, shown
from relax_core.contracts.tree import TokenTree
from relax_core.observe.sample_log import (
    NUMBERS_SUFFIX,
    SAMPLES_FOLDER,
    TOKENIZER_FOLDER,
    TOKENS_MARK,
    Frame,
    MadeRecord,
    MadeTokens,
    Numbers,
    TokensAt,
    TrainedTokens,
    check_frame,
    split_frames,
)

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


PROMPT, ANSWER = 200, 120  # characters of each


class NewestSamples:
    """Gives the newest ``groups`` groups that a run keeps as lines, each time that ``every`` train steps were done.

    What stood in the files before is never given. With 0 groups it reads nothing.
    """

    def __init__(self, run_dir: Path, *, groups: int, every: int, step: int) -> None:
        self._run_dir, self._groups, self._every = run_dir, groups, every
        self._next = _next_multiple(step, every) if groups else 0
        folder = run_dir / SAMPLES_FOLDER
        self._offsets = {name: (folder / name).stat().st_size for name in numbers_files(run_dir)}
        self._text: SampleText | None = None

    def lines(self, step: int) -> list[str]:
        """Returns the lines if it is time for them at this number of train steps, else none."""
        if not self._groups or step < self._next:
            return []
        self._next = _next_multiple(step, self._every)
        found: list[str] = []
        try:
            for record in self._newest():
                found += self._group(record)
        except (OSError, ValueError, TokensRemoved) as error:
            found.append(f"samples cannot be shown: {error}")
        return found

    def _newest(self) -> list[MadeRecord]:
        newest: deque[MadeRecord] = deque(maxlen=self._groups)
        for name in numbers_files(self._run_dir):
            while frames := read_frames(self._run_dir / SAMPLES_FOLDER / name, self._offsets.get(name, 0)):
                self._offsets[name] = frames[-1].offset + frames[-1].size
                newest.extend(
                    record for record in map(decode_numbers, frames) if isinstance(record, MadeRecord) and record.tokens
                )
        return list(newest)

    def _group(self, record: MadeRecord) -> Iterator[str]:
        if self._text is None:
            self._text = SampleText(self._run_dir)
        tree = read_made_tree(self._run_dir, record)
        episodes = decode_episodes(bytes(record.episodes))
        for number, episode in enumerate(episodes):
            rows = tree.rows_of([number])
            sampled = np.flatnonzero(tree.versions[rows] >= 0)
            first = int(sampled[0]) if len(sampled) else len(rows)
            ids = tree.token_ids[rows]
            if number == 0:
                yield f"group {record.group_uid}: {_on_one_line(self._text.text(ids[:first].tolist()), most=PROMPT)}"
            answer = _on_one_line(self._text.text(ids[first:].tolist()), most=ANSWER)
            reward = "–" if episode.reward is None else f"{episode.reward:.3f}"
            yield f"  reward {reward}  {answer}"


def _next_multiple(step: int, every: int) -> int:
    return (step // every + 1) * every


def _on_one_line(text: str, *, most: int) -> str:
    """Returns the beginning of a text of a model, in which no character moves the cursor or turns the direction."""
    line = shown(text.replace("\n", "↵")[:most])
    return line if len(text) <= most else f"{line}…"
