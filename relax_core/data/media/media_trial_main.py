"""Decodes three built-in files, as `relax doctor` asks: ``python -m relax_core.data.media.media_trial_main``.

It runs in a process of its own, because a broken build of a decoder ends its process.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from relax_core.contracts.media import MediaKind, MediaSource
from relax_core.data.media.item_encoder import encode_item
from relax_core.data.media.media_limits import MediaLimits
from relax_core.families.architecture import PatchSettings

_SIDE = 64
# The patches of Qwen3-VL, with tokens of no tokenizer; images may be as small as those of this trial.
TRIAL_SETTINGS = PatchSettings(
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    image_token_id=1,
    video_token_id=2,
    vision_start_token_id=3,
    vision_end_token_id=4,
    min_pixels=_SIDE**2,
)
_LEVEL = 200
_TOLERANCE = 8  # WebP and MP4 lose some levels


def main() -> None:
    """Prints the formats that were decoded; ends with an exception if one of them cannot be, or has wrong pixels."""
    files: dict[str, tuple[MediaKind, bytes]] = {
        "PNG": ("image", _image("PNG")),
        "WebP": ("image", _image("WEBP")),
        "MP4": ("video", _video()),
    }
    for name, (kind, data) in files.items():
        source = MediaSource(kind=kind, data=data)
        _, tensors = encode_item(source, TRIAL_SETTINGS, MediaLimits(), root=Path("/"), tokenize=lambda text: [0])
        wrong = int(np.abs(tensors["frames"].astype(int) - _LEVEL).max())
        if wrong > _TOLERANCE:
            raise ValueError(f"{name} has pixels that are {wrong} levels off")
    print(", ".join(files))


def _image(form: str) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (_SIDE, _SIDE), (_LEVEL,) * 3).save(file, form)
    return file.getvalue()


def _video() -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width = stream.height = _SIDE
        stream.pix_fmt = "yuv420p"
        for _ in range(4):
            pixels = np.full((_SIDE, _SIDE, 3), _LEVEL, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


if __name__ == "__main__":
    main()
