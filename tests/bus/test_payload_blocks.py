"""Tests that small payloads are sent inside the message, and large payloads separately, in blocks of one column."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from relax_core.bus import ray_bus as wire
from relax_core.contracts.columns import TOKEN_IDS, decode_column, encode_column


def test_payloads_come_back_from_wherever_they_travelled() -> None:
    packer = wire.BlockPacker(inline_bytes=10)
    rows = [{"small": b"x" * 10, "pixels": b"p" * 11, "sound": bytes([n]) * 20} for n in range(3)]
    packed = [packer.split(row) for row in rows]
    assert [len(block) for block in packer.blocks] == [3, 3], "one block a column"
    for row, (small, large) in zip(rows, packed, strict=True):
        assert list(small) == ["small"]
        joined = wire.join(small, large, packer.blocks)
        assert {column: bytes(payload) for column, payload in joined.items()} == row


def test_a_full_block_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BLOCK_BYTES", 50)
    packer = wire.BlockPacker(inline_bytes=0)
    places = [packer.split({"a": bytes(20)})[1]["a"] for _ in range(4)]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_decoders_read_views_of_the_object_store() -> None:
    packer = wire.BlockPacker(inline_bytes=0)
    payloads = {"ids": encode_column(TOKEN_IDS, np.array([1, 2, 3])), "info": msgspec.msgpack.encode({"k": [1.5]})}
    _, large = packer.split(payloads)
    views = wire.join({}, large, packer.blocks)
    assert all(isinstance(view, memoryview) for view in views.values())
    ids = decode_column(TOKEN_IDS, views["ids"], rows=3)
    assert ids.tolist() == [1, 2, 3] and not ids.flags.owndata, "it is read without a copy"
    assert msgspec.msgpack.decode(views["info"]) == {"k": [1.5]}
