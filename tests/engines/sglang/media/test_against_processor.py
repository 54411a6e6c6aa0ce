"""Tests that items equal the inputs of Hugging Face's processor: patches bit for bit, ids and positions."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_core.contracts.media import MediaItem, MediaSource
from relax_core.contracts.media_file import write_item
from relax_core.data.media.item_encoder import encode_item
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.media.video_decoding import sample_frames
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.families.folder import vision_tower
from tests.contracts.engine.harness import ROOT, SGLANG_PYTHON
from tests.engines.sglang.media.vision_models import make_vision_model

pytestmark = pytest.mark.sglang
CHILD = Path(__file__).with_name("processor_child.py")
IMAGES = [(32, 32), (33, 201), (333, 201), (64, 48), (128, 128), (127, 129), (16, 16), (700, 901), (40, 300), (90, 31)]
VIDEOS = [(4, 2.0, 32, 32), (5, 2.0, 32, 64), (9, 4.0, 64, 48), (24, 24.0, 50, 70), (31, 7.0, 90, 33), (2, 1.0, 96, 64)]
LIMITS = MediaLimits()


def picture(height: int, width: int, *, seed: int) -> bytes:
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(noise).save(data, "PNG")
    return data.getvalue()


def film(frames: int, fps: float, height: int, width: int, *, seed: int) -> bytes:
    """Returns an MP4 of lossless noise."""
    import av

    data = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 256, (frames, height - height % 2, width - width % 2, 3), np.uint8)
    with av.open(data, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=int(fps), options={"qp": "0"})
        stream.height, stream.width, stream.pix_fmt = *noise.shape[1:3], "yuv420p"
        for frame in noise:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return data.getvalue()


def test_patches_ids_and_positions_are_the_processors(tmp_path: Path) -> None:
    """Encodes real files like a run: first every size separately, then prompts of several images and videos."""
    model, media = tmp_path / "model", tmp_path / "media"
    model.mkdir()
    media.mkdir()
    make_vision_model(model, name="tiny_qwen3_vl", seed=0)
    tower = vision_tower(model)
    assert tower is not None
    tokenize = PromptTokenizer(model).encode_plain

    def written(source: MediaSource) -> MediaItem:
        return write_item(media, *encode_item(source, tower, LIMITS, root=tmp_path, tokenize=tokenize))

    shown: list[dict[str, Any]] = []
    for seed, (height, width) in enumerate(IMAGES):
        item = written(MediaSource(kind="image", data=picture(height, width, seed=seed)))
        shown.append({"digest": item.digest})
    for seed, (frames, fps, height, width) in enumerate(VIDEOS):
        item = written(MediaSource(kind="video", data=film(frames, fps, height, width, seed=seed)))
        indices = sample_frames(frames, fps, LIMITS)
        shown.append({"digest": item.digest, "fps": fps, "indices": indices, "total": frames})
    several = [[shown[0], shown[11], shown[2]], [shown[12], shown[13]], [shown[3], shown[3]]]
    cases = [[shown_item] for shown_item in shown] + several
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [SGLANG_PYTHON, CHILD, ROOT, tmp_path], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(cases)
    assert [(case, result) for case, result in zip(cases, found, strict=True) if result["differ"]] == []
    assert all(result["patches"] >= 16 for result in found)
