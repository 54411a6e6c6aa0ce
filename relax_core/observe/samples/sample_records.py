"""Defines the records of the files in a run's folder ``samples``, and how they are framed.

Each process that makes or trains samples writes files of its own. ``NAME.START.msgpack`` has the numbers of its groups,
where START counts the starts of the process. ``NAME.START.tokens-PART.msgpack`` has their tokens; the numbers say where
the tokens of a group stand. A file is a sequence of msgpack byte strings, each of which holds one record as a msgpack
map. A file only grows. Its last frame may be half-written if its writer was killed.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from relax_core.contracts import columns as c
from relax_core.contracts.columns import encode_column
from relax_core.contracts.tree import TokenTree

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
