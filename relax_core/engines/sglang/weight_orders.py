"""Defines the orders from Relax's client to its loader inside SGLang's server, and encodes them for SGLang's route.

/update_weights_from_tensor takes a pickled list of (name, tensor) and the import path of a loader. The name is the
order, and the tensor is empty. The few bytes of pickle are written without the pickle module and hold one text. Relax
never reads a pickle.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec

from relax_core.contracts.engine import WeightManifest

NAMED = 5  # parameters that an error names


class LoadFile(msgspec.Struct, frozen=True, tag="load"):
    """Orders the ranks to compare the published file's digests, then to load it.

    Rank r writes its `Outcome` to the file ``outcome``.r, because an exception would end the server, and SGLang returns
    nothing else.
    """

    manifest: WeightManifest
    outcome: str


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Orders the ranks to compute a digest of the tensors that SGLang's own broadcast delivers from now on."""


class Attest(msgspec.Struct, frozen=True, tag="attest"):
    """Orders the ranks to end `Watch` and to compare its digest with ``digest``; for ``outcome`` see `LoadFile`."""

    digest: str
    outcome: str


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """Orders nothing; the call that carries it sets the server's weight version, also in the spans of each sample."""


class Outcome(msgspec.Struct, frozen=True):
    """Holds the outcome of an order at one rank.

    ``error`` is the reason of a failure, or None. ``changed`` is True if tensors were written before the failure.
    """

    error: str | None
    changed: bool = False


Order = LoadFile | Watch | Attest | Confirm
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Order)


def order_payload(order: Order) -> str:
    """Returns base64 of a pickle of ``[(order, torch.Tensor())]``."""
    text = _encoder.encode(order)
    name = b"X" + len(text).to_bytes(4, "little") + text
    return base64.b64encode(b"\x80\x02]" + name + b"ctorch\nTensor\n)R\x86a.").decode()


def read_order(name: str) -> Order:
    """Reads the order that is sent as a tensor's name."""
    return _decoder.decode(name)


def not_written(parameters: Sequence[str]) -> str:
    """Returns the error text for a version whose tensors SGLang has skipped, so that ``parameters`` lack values."""
    more = f" and {len(parameters) - NAMED} more" if len(parameters) > NAMED else ""
    names = ", ".join(parameters[:NAMED])
    return f"SGLang took no weights, or not all, for {len(parameters)} of its parameters: {names}{more}"
