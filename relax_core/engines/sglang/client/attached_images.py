"""Sends images to a server that the run did not start: such a server has no media folder and expands by itself.

It gets a PNG of the resized frame, so that the resize of its own processor changes nothing, and one placeholder for
each image. Its answer says how many prompt tokens it has made of them, which is compared with the prompt's.
"""

from __future__ import annotations

import base64
import secrets
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from relax_core.contracts.media import Media, short_form
from relax_core.contracts.media_file import FolderReader
from relax_core.engines.sglang.client.prompt_requests import MediaEntries

_COMPRESSION = 1  # zlib's fastest level: the bytes go to a server nearby


class AttachedImages:
    """Makes the requests for a server that decodes images itself.

    SGLang keeps the features of an image by its bytes, beyond every weight update. The PNGs of this object therefore
    contain a text of their own, with the weight version, which makes them other bytes under other weights.
    """

    def __init__(self, media_folder: Path | None) -> None:
        self._reader = None if media_folder is None else FolderReader(media_folder)
        self._mark = secrets.token_hex(8)

    def entries(self, input_ids: list[int], media: Sequence[Media], *, version: int) -> MediaEntries:
        """Returns the ids with a placeholder for each image, and the images as base64 of PNGs.

        Raises ValueError for a video, because SGLang would sample, resize and time its frames again.
        """
        if not media:
            return input_ids, []
        if any(one.item.kind == "video" for one in media):
            raise ValueError(
                "a server that engine.urls names takes images only, and the prompt has a video. Let the run start its "
                "servers (drop engine.urls), or leave videos out (modality=text, or other data)."
            )
        if self._reader is None:
            raise ValueError("the prompt has an image, and the run has no media folder (modality=text?).")
        comment = f"{self._mark} {version}"
        frames = [self._reader.tensors(one.item)["frames"][0] for one in media]
        pictures = [base64.b64encode(png(frame, comment=comment)).decode() for frame in frames]
        return short_form(input_ids, media), pictures


def png(frame: np.ndarray, *, comment: str) -> bytes:
    """Returns a frame, uint8 ``[height, width, 3]``, as a PNG with a text chunk (W3C PNG, third edition)."""
    height, width, _ = frame.shape
    rows = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # each row begins with 0: no filter
    rows[:, 1:] = frame.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a colour, RGB, not interlaced
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(kind, data)
        for kind, data in (
            (b"IHDR", header),
            (b"tEXt", b"Comment\0" + comment.encode("latin-1")),
            (b"IDAT", zlib.compress(rows.tobytes(), _COMPRESSION)),
            (b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
