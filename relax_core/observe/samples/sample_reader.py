"""Reads the files of a run's samples, also while they are written and after the run's folder was copied elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from relax_core.contracts import columns as c
from relax_core.contracts.bus import LeasedGroup
from relax_core.contracts.columns import decode_tree
from relax_core.contracts.tree import TokenTree
from relax_core.observe.samples.sample_records import (
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
    split_frames,
)

_OWN_NAME = re.compile(r"[\w-]+\.\d+(\.tokens-\d+)?\.msgpack")
READ_BYTES = 16 * 2**20
REPLACEMENT = "\ufffd"  # stands for bytes that are no character yet
_numbers = msgspec.msgpack.Decoder(Numbers)
_made = msgspec.msgpack.Decoder(MadeTokens)
_trained = msgspec.msgpack.Decoder(TrainedTokens)


class TokensRemoved(Exception):
    """The tokens of a sample are not there any more, because ``tracker.samples_max_mb`` was reached."""


def numbers_files(run_dir: Path) -> list[str]:
    """Returns the names of the files with numbers in a run's folder of samples, sorted; none without such a folder.

    Links and whatever is no plain file are left out.
    """
    folder = run_dir / SAMPLES_FOLDER
    return sorted(
        path.name for path in folder.glob(f"*{NUMBERS_SUFFIX}") if TOKENS_MARK not in path.name and _is_plain(path)
    )


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def read_frames(path: Path, offset: int, *, most_bytes: int = READ_BYTES) -> list[Frame]:
    """Returns the whole frames of a file from ``offset`` on, of at most about ``most_bytes`` unless one is larger.

    Raises ValueError for a file that holds something else.
    """
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(most_bytes)
        frames = split_frames(data, offset=offset)
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
    except msgspec.DecodeError as error:
        raise ValueError(f"the record at byte {frame.offset} is of another Relax or damaged: {error}") from error


def read_numbers_at(run_dir: Path, at: TokensAt) -> Numbers:
    """Returns the record of the frame at ``at``, as `decode_numbers` does."""
    return decode_numbers(Frame(_payload(run_dir, at), at.offset, at.size))


def read_made_tree(run_dir: Path, record: MadeRecord) -> TokenTree:
    """Returns the tree of a record. Raises TokensRemoved if its tokens are not there any more."""
    assert record.tokens is not None, "every record in a file says where its tokens stand"
    columns = _made.decode(_payload(run_dir, record.tokens)).columns | {c.EPISODES: bytes(record.episodes)}
    return decode_tree(
        LeasedGroup(group_uid=record.group_uid, index=0, uids=[], versions=record.versions, columns=columns)
    )


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
    path = run_dir / SAMPLES_FOLDER / at.file
    if path.exists() and not _is_plain(path):
        raise TokensRemoved(f"{at.file} is no plain file")
    try:
        with path.open("rb") as file:
            file.seek(at.offset)
            data = file.read(at.size)
    except FileNotFoundError as error:
        raise TokensRemoved(f"{at.file} is not there any more: tracker.samples_max_mb was reached") from error
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
        if not _is_plain(path):
            raise FileNotFoundError(path)
        try:
            tokenizer = Tokenizer.from_file(str(path))
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


MOST_BYTES_OF_A_CHARACTER = 4
