"""Compares Relax's encoding of media items with Hugging Face's processor.

The test runs this program in SGLang's environment with torchvision.

    python processor_child.py ROOT FOLDER

FOLDER has the model folder ``model``, the items in ``media``, and ``cases.json``: for each case the digests of its
items, and for each video its frame rate and frame numbers. Prints one JSON object per case.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(root: str, folder: Path) -> None:
    """Prints for each case whether patches, ids and positions are equal."""
    sys.path.insert(0, root)
    from relax_core.engines.sglang.sglang_patches import install_on_cpu

    install_on_cpu()
    import torch
    from transformers import AutoProcessor, Qwen3VLConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    processor = AutoProcessor.from_pretrained(folder / "model")
    with torch.device("meta"):
        model = Qwen3VLModel(Qwen3VLConfig.from_pretrained(folder / "model"))
    for case in json.loads((folder / "cases.json").read_text()):
        print(json.dumps(compare(folder, processor, model, case)), flush=True)


def compare(folder: Path, processor: Any, model: Any, case: list[dict[str, Any]]) -> dict[str, Any]:
    """Makes a prompt with the items of a case and text around them. Returns the differences for this prompt."""
    import numpy as np
    import torch

    from relax_core.contracts.media import Media
    from relax_core.contracts.media_file import FolderReader
    from relax_core.contracts.rotary import rotary_of_sequence
    from relax_core.families.folder import vision_tower
    from relax_core.families.tower_passes import patches_of

    reader, tower = FolderReader(folder / "media"), vision_tower(folder / "model")
    assert tower is not None
    items = [reader.open(item["digest"]) for item in case]
    pads = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    text = "what? " + " and ".join(f"<|vision_start|>{pads[item.kind]}<|vision_end|>" for item, _ in items) + " is"
    by_kind = {
        kind: [np.array(arrays["frames"]) for item, arrays in items if item.kind == kind] for kind in ("image", "video")
    }
    given: dict[str, Any] = {}
    if by_kind["image"]:
        given["images"] = [torch.from_numpy(frames[0]).permute(2, 0, 1) for frames in by_kind["image"]]
    if by_kind["video"]:
        given["videos"] = [torch.from_numpy(frames).permute(0, 3, 1, 2) for frames in by_kind["video"]]
        given["video_metadata"] = [
            {"fps": item["fps"], "frames_indices": item["indices"], "total_num_frames": item["total"]}
            for item in case
            if "fps" in item
        ]
        given["do_sample_frames"] = False
    theirs = processor(text=[text], return_tensors="pt", **given)
    differ = []
    for kind, key in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if by_kind[kind]:
            ours = torch.cat([patches_of(frames, tower) for frames in by_kind[kind]])
            if not torch.equal(ours, theirs[key]):
                differ.append(f"{key} {tuple(ours.shape)} {tuple(theirs[key].shape)}")
    ids: list[int] = processor.tokenizer(text)["input_ids"]
    media, done = [], 0
    for item, _ in items:
        size = len(item.placeholder)
        start = next(at for at in range(done, len(ids)) if ids[at : at + size] == item.placeholder)
        ids[start : start + size] = item.ids.tolist()
        done = start + item.rows
        media.append(Media(item, start, done))
    if ids != theirs["input_ids"][0].tolist():
        differ.append(f"ids {len(ids)} {theirs['input_ids'].shape[1]}")
    grids = {name: theirs[name] for name in ("image_grid_thw", "video_grid_thw") if name in theirs}
    positions, delta = model.get_rope_index(
        input_ids=theirs["input_ids"], mm_token_type_ids=theirs["mm_token_type_ids"], **grids
    )
    mine, following = rotary_of_sequence(len(ids), media)
    if positions[:, 0].tolist() != mine.tolist() or int(delta[0]) != following - len(ids):
        differ.append("positions")
    return {"differ": differ, "tokens": len(ids), "patches": sum(item.patches for item, _ in items)}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
