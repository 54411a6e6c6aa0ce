"""How a group travels as bus columns: one payload of bytes for each (group, column).

Ragged numbers (token ids, log-probs, advantages) travel flat with their lengths, so that a consumer reads them
without a copy; everything else is msgpack. No pickle anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.sample import Group, VersionSpan

Columns = dict[str, bytes]

PROMPT_IDS = "prompt_ids"  # int32 [prompt]
RESPONSE_IDS = "response_ids"  # Ragged int32 [samples][response]
LOSS_MASK = "loss_mask"  # Ragged uint8, 1 = trained
ROLLOUT_LOGPROBS = "rollout_logprobs"  # Ragged float32
WEIGHT_VERSIONS = "weight_versions"  # list[list[VersionSpan]], one list a sample
REWARDS = "rewards"  # float32 [samples]
SAMPLE_INFO = "sample_info"  # list[SampleInfo]
OLD_LOGPROBS = "old_logprobs"  # Ragged float32, written by actor_fwd
REFERENCE_LOGPROBS = "reference_logprobs"  # Ragged float32, written by reference
ADVANTAGES = "advantages"  # Ragged float32, written by advantages
RETURNS = "returns"  # Ragged float32, written by advantages where there is a critic
VALUES = "values"  # Ragged float32, written by critic
TEACHER = "teacher"  # msgpack str, the name of the prompt's teacher
TEACHER_LOGPROBS = "teacher_logprobs"  # Ragged float32, written by teacher
TEACHER_TOP_IDS = "teacher_top_ids"  # Ragged int32, top_k numbers a response token, written by teacher
TEACHER_TOP_LOGPROBS = "teacher_top_logprobs"  # Ragged float32, the same

# The experts of the group's rows as the trainer packs them: the prompt's, then each response's but its last token's
ROUTED_EXPERTS = "routed_experts"

# KeptTokens of the group's response tokens, sample after sample, where top_k, top_p or min_p leaves tokens out
KEPT_TOKENS = "kept_tokens"

ROLLOUT_COLUMNS = (
    PROMPT_IDS,
    RESPONSE_IDS,
    LOSS_MASK,
    ROLLOUT_LOGPROBS,
    WEIGHT_VERSIONS,
    REWARDS,
    SAMPLE_INFO,
)

BOOKED_COLUMNS = (WEIGHT_VERSIONS, REWARDS, SAMPLE_INFO)  # the ledger's file keeps them of every row: they are small


class Ragged(msgspec.Struct, frozen=True, array_like=True):
    """Rows of differing length, stored flat. ``dtype`` is a numpy name; ``data`` is little-endian and C-ordered."""

    dtype: str
    lengths: list[int]
    data: bytes

    def flat(self) -> np.ndarray:
        """All rows one after the other, ``[sum(lengths)]``; a read-only view of the payload."""
        return np.frombuffer(self.data, dtype=self.dtype)

    def rows(self) -> list[np.ndarray]:
        """One read-only array a row."""
        return np.split(self.flat(), np.cumsum(self.lengths[:-1])) if self.lengths else []


class SampleInfo(msgspec.Struct, frozen=True, array_like=True):
    """What is told of a sample beside its tensors."""

    uid: str
    finish_reason: str
    reward_parts: dict[str, float]
    engine: str = ""


class _RoutedExperts(msgspec.Struct, frozen=True, array_like=True):
    """``shape`` is [tokens, MoE layers, experts a token]; ``data`` is little-endian and C-ordered."""

    dtype: Literal["uint8", "uint16"]
    shape: tuple[int, int, int]
    data: bytes


_encoder = msgspec.msgpack.Encoder()
_ragged_decoder = msgspec.msgpack.Decoder(Ragged)
_spans_decoder = msgspec.msgpack.Decoder(list[list[VersionSpan]])
_info_decoder = msgspec.msgpack.Decoder(list[SampleInfo])
_experts_decoder = msgspec.msgpack.Decoder(_RoutedExperts)
_kept_decoder = msgspec.msgpack.Decoder(KeptTokens)


def encode_ragged(rows: Sequence[Sequence[float] | np.ndarray], *, dtype: str) -> bytes:
    """Encodes rows of numbers as one payload."""
    lengths = [len(row) for row in rows]
    flat = np.empty(sum(lengths), dtype=dtype)
    start = 0
    for row, length in zip(rows, lengths, strict=True):
        flat[start : start + length] = row
        start += length
    return _encoder.encode(Ragged(dtype, lengths, flat.tobytes()))


def encode_flat(flat: np.ndarray, lengths: Sequence[int]) -> bytes:
    """Encodes an already flat array ``[sum(lengths)]`` as a ragged payload."""
    assert flat.ndim == 1 and flat.shape[0] == sum(lengths)
    return _encoder.encode(Ragged(flat.dtype.name, [int(n) for n in lengths], np.ascontiguousarray(flat).tobytes()))


def decode_ragged(payload: bytes) -> Ragged:
    return _ragged_decoder.decode(payload)


def encode_array(values: Sequence[float] | np.ndarray, *, dtype: str) -> bytes:
    """Encodes a one-dimensional array as a ragged payload of one row."""
    return encode_ragged([values], dtype=dtype)


def decode_array(payload: bytes) -> np.ndarray:
    return _ragged_decoder.decode(payload).flat()


def decode_weight_versions(payload: bytes) -> list[list[VersionSpan]]:
    return _spans_decoder.decode(payload)


def decode_sample_info(payload: bytes) -> list[SampleInfo]:
    return _info_decoder.decode(payload)


def decode_routed_experts(payload: bytes) -> np.ndarray:
    """uint8 or uint16 ``[packed tokens, MoE layers, experts a token]``, read-only."""
    experts = _experts_decoder.decode(payload)
    return np.frombuffer(experts.data, dtype=experts.dtype).reshape(experts.shape)


def encode_routed_experts(experts: np.ndarray) -> bytes:
    """Of uint8 or uint16 ``[packed tokens, MoE layers, experts a token]``."""
    dtype: Literal["uint8", "uint16"] = "uint8" if experts.dtype == np.uint8 else "uint16"
    tokens, layers, per_token = experts.shape
    return _encoder.encode(_RoutedExperts(dtype, (tokens, layers, per_token), experts.astype(dtype).tobytes()))


def decode_kept_tokens(payload: bytes) -> KeptTokens:
    """One set for each of the group's response tokens."""
    return _kept_decoder.decode(payload)


def encode_group(group: Group) -> Columns:
    """The rollout's columns of a complete group. Every sample must have a reward: drop the others first."""
    samples = group.samples
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    assert samples and len(rewards) == len(samples)
    extras: Columns = {}
    if group.routed_experts is not None:
        parts = [group.routed_experts, *(s.routed_experts for s in samples if s.routed_experts is not None)]
        assert len(parts) == 1 + len(samples), "asked for with every prompt of a run or with none"
        extras[ROUTED_EXPERTS] = encode_routed_experts(np.concatenate(parts))
    kept = [s.kept for s in samples if s.kept is not None]
    if kept:
        assert len(kept) == len(samples), "asked for with every prompt of a run or with none"
        extras[KEPT_TOKENS] = _encoder.encode(KeptTokens.joined(kept))
    return extras | {
        PROMPT_IDS: encode_array(group.prompt_ids, dtype="int32"),
        RESPONSE_IDS: encode_ragged([s.response_ids for s in samples], dtype="int32"),
        LOSS_MASK: encode_ragged([s.loss_mask for s in samples], dtype="uint8"),
        ROLLOUT_LOGPROBS: encode_ragged([s.rollout_logprobs for s in samples], dtype="float32"),
        WEIGHT_VERSIONS: _encoder.encode([s.weight_versions for s in samples]),
        REWARDS: encode_array(rewards, dtype="float32"),
        SAMPLE_INFO: _encoder.encode([SampleInfo(s.uid, s.finish_reason, s.reward_parts, s.engine) for s in samples]),
    }


def booked_payloads(columns: Mapping[str, bytes]) -> tuple[bytes, ...] | None:
    """What the ledger's file keeps of a row; None for a row without it, e.g. one whose samples were all dropped."""
    if not all(column in columns for column in BOOKED_COLUMNS):
        return None
    return tuple(columns[column] for column in BOOKED_COLUMNS)


def payload_bytes(columns: Mapping[str, bytes]) -> int:
    """Bytes of all payloads of a row."""
    return sum(len(payload) for payload in columns.values())
