"""Encodes a token tree as columns of a group: one payload of bytes for each (group, column).

A numeric column contains the bytes of an array, little-endian and C-ordered, so it is read without a copy. This module
defines the column's dtype; the number of rows is the tree's. Episodes and media are msgpack. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from relax_core.contracts.bus import Group
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media
from relax_core.contracts.tree import BY_TOKEN, Episode, TokenTree, check_tree

Columns = dict[str, bytes]
GroupColumns = dict[str, Columns]  # group uid → column → encoded values

TOKEN_IDS = "token_ids"
END = "end"
LOSS_MASK = "loss_mask"
LOGPROBS = "logprobs"
VERSIONS = "versions"
EPISODES = "episodes"  # list[Episode]
MEDIA = "media"  # list[Media]
FORWARD_COLUMNS = (TOKEN_IDS, END, VERSIONS, EPISODES, MEDIA)  # the inputs of a forward pass
# The columns of a tree without token ids: enough to form micro-batches and to compute a step's metrics.
STRUCTURE_COLUMNS = (END, LOSS_MASK, LOGPROBS, VERSIONS, EPISODES, MEDIA)
ROLLOUT_COLUMNS = (TOKEN_IDS, END, LOSS_MASK, LOGPROBS, VERSIONS, EPISODES, MEDIA)

OLD_LOGPROBS = "old_logprobs"  # written by actor_fwd
REFERENCE_LOGPROBS = "reference_logprobs"  # written by reference
VALUES = "values"  # written by critic: the value before each row
ADVANTAGES = "advantages"  # one entry for each token (`relax_core.contracts.tree.BY_TOKEN`)
RETURNS = "returns"  # one entry for each token, if there is a critic
TEACHER = "teacher"  # msgpack str, the name of the prompt's teacher
TEACHER_LOGPROBS = "teacher_logprobs"  # written by teacher
TEACHER_TOP_IDS = "teacher_top_ids"  # [rows, top_k], written by teacher
TEACHER_TOP_LOGPROBS = "teacher_top_logprobs"  # [rows, top_k], written by teacher
ROUTED_EXPERTS = "routed_experts"  # two bytes with the dtype's name, then [rows, MoE layers, experts per token]
KEPT_TOKENS = "kept_tokens"  # KeptTokens, one set for each row, if top_k, top_p or min_p excludes tokens

PERSISTED_COLUMNS = (EPISODES,)  # small columns of every group that the ledger's file stores

_DTYPES = {
    TOKEN_IDS: "<i4",
    END: "<i4",
    LOSS_MASK: "|b1",
    LOGPROBS: "<f4",
    VERSIONS: "<i4",
    OLD_LOGPROBS: "<f4",
    REFERENCE_LOGPROBS: "<f4",
    VALUES: "<f4",
    ADVANTAGES: "<f4",
    RETURNS: "<f4",
    TEACHER_LOGPROBS: "<f4",
    TEACHER_TOP_IDS: "<i4",
    TEACHER_TOP_LOGPROBS: "<f4",
}
_EXTRAS = {*_DTYPES, ROUTED_EXPERTS} - {*ROLLOUT_COLUMNS}
_WIDE = {TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS}  # columns with a second axis
_EXPERT_DTYPES: dict[bytes, np.dtype[Any]] = {b"u1": np.dtype("u1"), b"u2": np.dtype("<u2")}

_encoder = msgspec.msgpack.Encoder()
_episodes_decoder = msgspec.msgpack.Decoder(list[Episode])
_media_decoder = msgspec.msgpack.Decoder(list[Media])
_kept_decoder = msgspec.msgpack.Decoder(KeptTokens)


class _ItemName(msgspec.Struct, frozen=True):
    digest: str
    nbytes: int


class _PlacedItem(msgspec.Struct, frozen=True):
    """Holds the fields of a `Media` that the bus decodes; the decoder skips all other fields."""

    item: _ItemName


_named_decoder = msgspec.msgpack.Decoder(list[_PlacedItem])
_NO_MEDIA = _encoder.encode([])


def media_sizes(columns: Mapping[str, bytes]) -> dict[str, int]:
    """Returns the size in bytes of each media item in a group's tree, by digest.

    Raises ValueError if column `MEDIA` is damaged.
    """
    payload = columns.get(MEDIA, _NO_MEDIA)
    if payload == _NO_MEDIA:
        return {}
    try:
        return {medium.item.digest: medium.item.nbytes for medium in _named_decoder.decode(payload)}
    except msgspec.DecodeError as error:
        raise ValueError(f"column {MEDIA} is not a list of media items: {error}") from error


def encode_tree(tree: TokenTree) -> Columns:
    """Returns all columns of a tree. Raises ValueError as `check_tree` does."""
    check_tree(tree)
    columns = {
        TOKEN_IDS: encode_column(TOKEN_IDS, tree.token_ids),
        END: encode_column(END, tree.end),
        LOSS_MASK: encode_column(LOSS_MASK, tree.loss_mask),
        LOGPROBS: encode_column(LOGPROBS, tree.logprobs),
        VERSIONS: encode_column(VERSIONS, tree.versions),
        EPISODES: _encoder.encode(tree.episodes),
        MEDIA: _encoder.encode(tree.media),
        **{name: encode_column(name, array) for name, array in tree.extras.items()},
    }
    if tree.kept is not None:
        assert tree.kept.tokens == tree.rows, "a tree has one kept set for each row"
        columns[KEPT_TOKENS] = _encoder.encode(tree.kept)
    return columns


def with_columns(rows: Iterable[Group], columns: Mapping[str, Mapping[str, bytes]]) -> list[Group]:
    """Returns the groups with further ``columns`` (group uid → column → encoded values)."""
    return [msgspec.structs.replace(row, columns={**row.columns, **columns.get(row.group_uid, {})}) for row in rows]


def encode_column(name: str, array: np.ndarray) -> bytes:
    """Returns the bytes of an array in the column's dtype, without the number of rows."""
    if name == ROUTED_EXPERTS:
        narrow = b"u1" if array.max(initial=0) <= np.iinfo(np.uint8).max else b"u2"
        return narrow + array.astype(_EXPERT_DTYPES[narrow], copy=False).tobytes()
    return np.ascontiguousarray(array, dtype=_DTYPES[name]).tobytes()


def decode_column(name: str, payload: bytes, *, rows: int) -> np.ndarray:
    """Returns a read-only view of the payload, ``[rows]`` or ``[rows, …]``.

    ``rows`` is the tree's number of rows; for a column in `BY_TOKEN`, the tree's number of tokens. Raises ValueError if
    the payload has another number of entries.
    """
    if name == ROUTED_EXPERTS:
        flat = np.frombuffer(payload, dtype=_EXPERT_DTYPES[bytes(payload[:2])], offset=2)
    else:
        flat = np.frombuffer(payload, dtype=_DTYPES[name])
    if name in _WIDE or name == ROUTED_EXPERTS:
        if rows and flat.size % rows == 0:
            return flat.reshape(rows, -1)
    elif flat.size == rows:
        return flat
    raise ValueError(f"column {name} has {flat.size} numbers for {rows} rows")


def decode_episodes(payload: bytes) -> list[Episode]:
    """Returns the episodes of column `EPISODES`."""
    return _episodes_decoder.decode(payload)


def decode_tree(row: Group) -> TokenTree:
    """Returns the tree of a leased group that has at least the columns `END`, `VERSIONS` and `EPISODES`.

    Without `LOSS_MASK` the mask selects all sampled rows. Without `LOGPROBS` the log-probs are 0. Without `TOKEN_IDS`
    the ids are -1, which is not a valid token id. Raises ValueError, with the group's uid, if the columns contradict
    each other.
    """
    columns = row.columns
    try:
        return _decode_tree(row.group_uid, columns)
    except ValueError as error:
        raise ValueError(f"group {row.group_uid}: {error}") from error


def _decode_tree(uid: str, columns: Mapping[str, bytes]) -> TokenTree:
    end = np.frombuffer(columns[END], dtype=_DTYPES[END])
    rows = len(end)
    token_ids = columns.get(TOKEN_IDS)
    versions = decode_column(VERSIONS, columns[VERSIONS], rows=rows)
    masks, logprobs = columns.get(LOSS_MASK), columns.get(LOGPROBS)
    extras: dict[str, np.ndarray] = {}
    tree = TokenTree(
        group_uid=uid,
        token_ids=np.full(rows, -1, np.int32) if token_ids is None else decode_column(TOKEN_IDS, token_ids, rows=rows),
        end=end,
        loss_mask=versions >= 0 if masks is None else decode_column(LOSS_MASK, masks, rows=rows),
        logprobs=np.zeros(rows, np.float32) if logprobs is None else decode_column(LOGPROBS, logprobs, rows=rows),
        versions=versions,
        episodes=decode_episodes(columns[EPISODES]),
        media=_media_decoder.decode(columns[MEDIA]) if MEDIA in columns else (),
        kept=_kept_decoder.decode(columns[KEPT_TOKENS]) if KEPT_TOKENS in columns else None,
        extras=extras,
    )
    for name in columns.keys() & _EXTRAS:
        its_rows = len(tree.tokens[1]) if name in BY_TOKEN else rows
        extras[name] = decode_column(name, columns[name], rows=its_rows)
    return tree


def persisted_payloads(columns: Mapping[str, bytes]) -> tuple[bytes, ...] | None:
    """Returns the payloads that the ledger's file stores for a group; None if a payload is missing.

    A group without kept samples has no columns.
    """
    if not all(column in columns for column in PERSISTED_COLUMNS):
        return None
    return tuple(columns[column] for column in PERSISTED_COLUMNS)


def payload_bytes(columns: Mapping[str, bytes]) -> int:
    """Returns the number of bytes of all payloads of a group."""
    return sum(len(payload) for payload in columns.values())
