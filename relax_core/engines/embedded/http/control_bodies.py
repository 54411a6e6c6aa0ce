"""Decodes and checks the bodies of all routes except /generate."""

from __future__ import annotations

import re
from typing import Literal, TypeVar

import msgspec

from relax_core.contracts.engine import PauseMode
from relax_core.engines.http_server.asgi import HttpError, clipped
from relax_core.weights.transports.base import WeightGroupAddress

GROUP_TIMEOUT_S = 60.0  # how long a gloo group waits for its ranks and for a broadcast
MAX_GROUP_TIMEOUT_S = 3600.0
MAX_NAME = 256  # characters
MAX_PATH = 4096  # characters, as in Linux
MAX_VERSION = (1 << 63) - 1
HOST = re.compile(r"[0-9A-Za-z._:%-]{1,253}")

S = TypeVar("S", bound=msgspec.Struct)


class AbortBody(msgspec.Struct):
    """Holds the body of /abort_request: the ``rid`` of one prompt, or ``abort_all``."""

    rid: str = ""
    abort_all: bool = False


class PauseBody(msgspec.Struct):
    """Holds the body of /pause_generation."""

    mode: PauseMode = "abort"


class DiskBody(msgspec.Struct):
    """Holds the body of /update_weights_from_disk; an empty ``digest`` is not compared."""

    model_path: str
    weight_version: str | int
    digest: str = ""


class DistributedBody(msgspec.Struct):
    """Holds the body of /update_weights_from_distributed: one broadcast of the bytes of all named tensors."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    load_format: Literal["flattened_bucket"]


class EndBody(msgspec.Struct):
    """Holds the body of /end_weight_update; an empty ``digest`` is not compared."""

    weight_version: str | int
    digest: str = ""


class GroupBody(msgspec.Struct):
    """Holds the body of /destroy_weights_update_group."""

    group_name: str


class InitGroupBody(msgspec.Struct):
    """Holds the body of /init_weights_update_group; ``rank_offset`` is the engine's rank in the group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str = "gloo"
    timeout_s: float = GROUP_TIMEOUT_S


class VersionBody(msgspec.Struct):
    """Holds the body of /update_weight_version."""

    new_version: str | int


def decode(body: bytes, kind: type[S]) -> S:
    """Decodes a JSON body; an empty one counts as {}. Raises HttpError 400 if it does not fit ``kind``."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError(400, f"body: {error}") from error
    except RecursionError as error:
        raise HttpError(400, "body: nested too deep; send flat values") from error


def version_of(value: str | int) -> int:
    """Returns the weight version as an integer. Raises HttpError 400 if it is not an integer from 0 on."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,19}", value):
        value = int(value)
    if isinstance(value, int) and 0 <= value <= MAX_VERSION:
        return value
    raise HttpError(
        400, f"weight_version={clipped(repr(value))}: versions are integers from 0 on; send the train step's number"
    )


def folder_of(body: DiskBody) -> str:
    """Returns the path of the model's folder. Raises HttpError 400 if it cannot be a path."""
    path = body.model_path
    if not path or len(path) > MAX_PATH or "\0" in path:
        raise HttpError(400, f"model_path={clipped(repr(path))}: no path; give a Hugging Face folder's")
    return path


def group_address(body: InitGroupBody) -> WeightGroupAddress:
    """Returns the address of the group. Raises HttpError 400 if one of its values cannot be used."""
    checks = {
        "backend": (body.backend, body.backend == "gloo", "gloo, because the embedded engine runs on the CPU"),
        "group_name": (body.group_name, 0 < len(body.group_name) <= MAX_NAME, f"1 to {MAX_NAME} characters"),
        "master_address": (body.master_address, HOST.fullmatch(body.master_address), "a host's name or address"),
        "master_port": (body.master_port, 0 < body.master_port < 1 << 16, "1 to 65535"),
        "world_size": (body.world_size, 1 < body.world_size < 1 << 16, "2 or more: rank 0, which sends, and engines"),
        "rank_offset": (body.rank_offset, 0 < body.rank_offset < body.world_size, "1 or more, below world_size"),
        "timeout_s": (
            body.timeout_s, 0.0 < body.timeout_s <= MAX_GROUP_TIMEOUT_S, f"above 0, at most {MAX_GROUP_TIMEOUT_S:g}"
        ),
    }  # fmt: skip
    for key, (value, fits, words) in checks.items():
        if not fits:
            raise HttpError(400, f"{key}={clipped(repr(value))}: give {words}")
    return WeightGroupAddress(
        name=body.group_name,
        address=body.master_address,
        port=body.master_port,
        world_size=body.world_size,
        backend=body.backend,
        timeout_s=body.timeout_s,
    )
