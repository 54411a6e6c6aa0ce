"""Runs transformers' Qwen3-VL processor: ``python published_processor.py ROOT FOLDER INPUT.npz OUTPUT.npz``.

It runs in SGLang's environment, because the processor needs torchvision. FOLDER has the tokenizer. The input has an
image, frames, their numbers and the frames per second; the output has token ids, grids and patches.
"""

from __future__ import annotations

import sys

import numpy as np

MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "12 "},
            {"type": "video", "video": "unused"},
            {"type": "image", "image": "unused"},
            {"type": "text", "text": " 34"},
        ],
    }
]


def main(root: str, folder: str, given: str, answer: str) -> None:
    sys.path.insert(0, root)
    from relax_core.engines.sglang.sglang_patches import install_on_cpu

    install_on_cpu()
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    from relax_core.families.tiny_configs import processor_files

    image, video = processor_files().values()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**image),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**video),
        chat_template=tokenizer.chat_template,
    )
    arrays = np.load(given)
    numbers = arrays["numbers"].tolist()
    found = processor(
        text=[processor.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)],
        images=[torch.from_numpy(arrays["picture"]).permute(2, 0, 1)],
        videos=[torch.from_numpy(arrays["frames"]).permute(0, 3, 1, 2)],
        video_metadata=[{"fps": float(arrays["fps"]), "frames_indices": numbers, "total_num_frames": numbers[-1] + 1}],
        do_sample_frames=False,
        return_tensors="pt",
    )
    names = ("input_ids", "image_grid_thw", "video_grid_thw", "pixel_values", "pixel_values_videos")
    np.savez(answer, **{name: found[name].numpy() for name in names})


if __name__ == "__main__":
    main(*sys.argv[1:])
