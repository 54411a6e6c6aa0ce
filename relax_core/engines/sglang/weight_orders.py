"""Defines and encodes the orders from Relax's client to Relax's weight loader inside SGLang's server.

SGLang's route /update_weights_from_tensor accepts a pickled list of (name, tensor) and the import path of a loader. The
order is sent as the name; the tensor is empty. The few bytes of the pickle are written without the pickle module and
contain only the order's text. Relax never reads a pickle.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec

from relax_core.contracts.engine import WeightManifest

NAMED = 5  # maximum parameters in an error text


class LoadFile(msgspec.Struct, frozen=True, tag="load"):
    """Orders the ranks to compare the published file's digests, then to load it.

    Rank r writes its `Outcome` to the file ``outcome``.r. It cannot report errors otherwise: an exception would end the
    server, and SGLang returns no result.
    """

    manifest: WeightManifest
    outcome: str


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Orders the ranks to compute a digest of the tensors that they receive by SGLang's broadcast from now on."""


class Attest(msgspec.Struct, frozen=True, tag="attest"):
    """Orders the ranks to end `Watch` and to compare its digest with ``digest``. For ``outcome`` see `LoadFile`."""

    digest: str
    outcome: str


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """Orders nothing. The call with this order sets the server's weight version, also in the spans of each sample."""


class Outcome(msgspec.Struct, frozen=True):
    """Holds the outcome of an order at one rank.

    ``error`` is the reason of a failure, or None. ``changed`` is True if the model was changed before the failure.
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
    """Decodes an order from the name of a tensor."""
    return _decoder.decode(name)


def not_written(parameters: Sequence[str]) -> str:
    """Returns the error text for a version with tensors that SGLang has skipped; ``parameters`` lack values."""
    more = f" and {len(parameters) - NAMED} more" if len(parameters) > NAMED else ""
    names = ", ".join(parameters[:NAMED])
    return f"SGLang has not loaded all weights for {len(parameters)} of its parameters: {names}{more}"
