"""Tests that arbitrary columns pass the bus unchanged, even if other groups have other columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from relax_core.contracts.bus import BusTimeout
from relax_core.contracts.columns import LOGPROBS, PERSISTED_COLUMNS, TOKEN_IDS, decode_column, encode_column
from tests.bus.blocking import BlockingBus
from tests.bus.make_rows import for_actor, for_worker, make_row

MakeBus = Callable[..., BlockingBus]
T = 60.0

TOKENS = np.arange(5003)
IMAGES = [np.arange(height * 7 * 3, dtype=np.uint8).reshape(height, 7, 3) for height in (1, 40, 400)]
OBJECT = {"turns": [{"role": "user", "text": "zwölf"}], "score": 0.5, "none": None, "deep": [[1], [2, [3]]]}


def encode_images(images: list[np.ndarray]) -> bytes:
    return msgspec.msgpack.encode([(image.shape, image.tobytes()) for image in images])


def decode_images(payload: bytes) -> list[np.ndarray]:
    parts = msgspec.msgpack.decode(payload, type=list[tuple[tuple[int, ...], bytes]])
    return [np.frombuffer(data, np.uint8).reshape(shape) for shape, data in parts]


def columns_of(kind: str) -> dict[str, bytes]:
    return {
        "a": b"",
        TOKEN_IDS: encode_column(TOKEN_IDS, TOKENS),
        LOGPROBS: encode_column(LOGPROBS, np.full(5003, -0.25)),
        "images": encode_images(IMAGES),
        "raw": bytes(range(256)) * 20,
        "object": msgspec.msgpack.encode(OBJECT),
    } | ({"sound": b"\x00\xff" * 9000} if kind == "video" else {})


def test_every_kind_of_payload_comes_back(make_bus: MakeBus) -> None:
    bus = make_bus()
    kinds = ("image", "video")
    rows = [make_row(a, columns=columns_of(kind)) for a, kind in zip(bus.admit(2, timeout_s=T), kinds, strict=True)]
    bus.put(rows, timeout_s=T)  # the groups of one call have different columns
    (heard,) = bus.lease(for_worker(("sound", "a"), task="listener"), timeout_s=T).rows
    assert (heard.index, bytes(heard.columns["sound"])) == (1, b"\x00\xff" * 9000)
    request = msgspec.structs.replace(for_actor(0), columns=tuple(columns_of("image")))
    for row in bus.lease(request, timeout_s=T).rows:
        columns = row.columns
        assert columns.keys() == columns_of("image").keys()
        assert bytes(columns["a"]) == b""
        assert decode_column(TOKEN_IDS, columns[TOKEN_IDS], rows=5003).tolist() == TOKENS.tolist()
        assert decode_column(LOGPROBS, columns[LOGPROBS], rows=5003).tolist() == [-0.25] * 5003
        for image, sent in zip(decode_images(columns["images"]), IMAGES, strict=True):
            np.testing.assert_array_equal(image, sent)
        assert bytes(columns["raw"]) == bytes(range(256)) * 20
        assert msgspec.msgpack.decode(columns["object"]) == OBJECT


@pytest.mark.parametrize("nbytes", [0, 1024, 1025, 100_000])
def test_sizes_around_the_inline_limit(make_bus: MakeBus, nbytes: int) -> None:
    bus = make_bus(groups_per_step=1)
    (admission,) = bus.admit(1, timeout_s=T)
    payload = np.random.default_rng(nbytes).bytes(nbytes)
    bus.put([make_row(admission, columns={"a": payload})], timeout_s=T)
    lease = bus.lease(for_worker(), timeout_s=T)
    bus.write(lease.lease_id, {admission.group_uid: {"b": payload[::-1]}}, timeout_s=T)
    columns: Any = bus.lease(for_worker(("b", "a"), task="reader"), timeout_s=T).rows[0].columns
    assert (bytes(columns["a"]), bytes(columns["b"])) == (payload, payload[::-1])


def test_columns_that_the_ledger_persists_travel_too(make_bus: MakeBus) -> None:
    bus = make_bus(groups_per_step=1)
    (admission,) = bus.admit(1, timeout_s=T)
    sent = {column: bytes([place]) * 2000 for place, column in enumerate((*PERSISTED_COLUMNS, "a"))}
    bus.put([make_row(admission, columns=sent)], timeout_s=T)
    got = bus.lease(for_worker(tuple(sent)), timeout_s=T).rows[0].columns
    assert {column: bytes(payload) for column, payload in got.items()} == sent


def test_a_lease_may_leave_payloads_to_whoever_reads_them(make_bus: MakeBus) -> None:
    bus = make_bus()
    bus.put([make_row(a, columns=columns_of("image")) for a in bus.admit(1, timeout_s=T)], timeout_s=T)
    request = msgspec.structs.replace(
        for_actor(0, groups=1), columns=("a", "object", "raw", "new"), payloads=("a", "object")
    )
    with pytest.raises(BusTimeout, match="1 lack column new"):  # a column without a payload must exist, too
        bus.lease(request, timeout_s=0.05)
    lease = bus.lease(msgspec.structs.replace(request, columns=("a", "object", "raw")), timeout_s=T)
    (row,) = lease.rows
    assert {name: bytes(payload) for name, payload in row.columns.items()} == {
        "a": b"",
        "object": msgspec.msgpack.encode(OBJECT),
    }
    (rest,) = bus.read(lease.lease_id, [row.group_uid], columns=("raw", TOKEN_IDS), timeout_s=T)
    assert bytes(rest.columns["raw"]) == bytes(range(256)) * 20
    assert decode_column(TOKEN_IDS, rest.columns[TOKEN_IDS], rows=5003).tolist() == TOKENS.tolist()
