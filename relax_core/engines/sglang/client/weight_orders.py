"""What our client asks of our loader inside SGLang's server, and how it travels through SGLang's own route.

/update_weights_from_tensor takes a pickled list of (name, tensor) and the import path of a loader. The order is the
name; the tensor is empty. The few bytes of pickle are written by hand: they hold one text, and we never read any.
"""

from __future__ import annotations

import base64

import msgspec

from relax_core.contracts.engine import WeightManifest


class LoadFile(msgspec.Struct, frozen=True, tag="load"):
    """Compare the published file's digests, then load it. Rank r writes what came of it into ``outcome``.r: an
    exception would end the server, and SGLang has no other way to tell."""

    manifest: WeightManifest
    outcome: str


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """From now on keep the digest of whatever the model loads, which comes in by SGLang's own broadcast."""


class Attest(msgspec.Struct, frozen=True, tag="attest"):
    """Stop watching, and compare with ``digest``."""

    digest: str
    outcome: str


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """Nothing: the call that carries it sets the weight version, here and in the spans of each sample."""


class Outcome(msgspec.Struct, frozen=True):
    """``error``: why the order was not followed, or None."""

    error: str | None


Order = LoadFile | Watch | Attest | Confirm
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Order)


def order_payload(order: Order) -> str:
    """base64 of a pickle of ``[(order, torch.Tensor())]``."""
    text = _encoder.encode(order)
    name = b"X" + len(text).to_bytes(4, "little") + text
    return base64.b64encode(b"\x80\x02]" + name + b"ctorch\nTensor\n)R\x86a.").decode()


def read_order(name: str) -> Order:
    return _decoder.decode(name)
