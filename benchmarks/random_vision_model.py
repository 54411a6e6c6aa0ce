"""Makes a Qwen3-VL of 11M random parameters and data rows with one image each, for runs that depend on sizes only.

python -m benchmarks.random_vision_model FOLDER

FOLDER gets the model in the published layout of Qwen3-VL, and `ROWS`, a Parquet file of 600 rows. An image has 480 rows
of pixels and 480 to 508 columns, so its 900 to 960 patches of 16 pixels become 225 to 240 token rows.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

ROWS = "rows.parquet"
ROW_COUNT = 600  # 256 of the rows are held out
SIDE, WIDER = 480, 7  # pixels; the widths of five successive images increase by WIDER
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 70, 220)}
PATCH = 16  # pixels
TEXT = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [12, 10, 10]},
}
TOWER = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_heads": 6,
    "depth": 8,
    "out_hidden_size": 256,
    "deepstack_visual_indexes": [1, 4],
    "patch_size": PATCH,
    "num_position_embeddings": 2304,
}


def vision_settings() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns the model's config.json and its processor files by name."""
    from relax_core.families.tiny_configs import VISION, processor_files, tiny_config

    config, files = tiny_config(VISION), processor_files()
    config["text_config"] |= TEXT
    config["vision_config"] |= TOWER
    limits = {"shortest_edge": 256 * PATCH * PATCH, "longest_edge": 65536 * PATCH * PATCH}  # in pixels
    return config, {name: settings | {"patch_size": PATCH, "size": limits} for name, settings in files.items()}


def write_model(folder: Path) -> None:
    """Writes the model, its tokenizer and its processor files."""
    import torch

    from relax_core.families.hf_config import CONFIG_FILE
    from relax_core.tools.tiny_media import build_vision_model, write_published
    from relax_core.tools.tiny_text import build_tokenizer

    torch.manual_seed(0)
    config, files = vision_settings()
    build_tokenizer(vision=True).save_pretrained(folder)
    for name, values in {CONFIG_FILE: config, **files}.items():
        (folder / name).write_text(json.dumps(values, indent=2))
    write_published(build_vision_model(config), folder)


def write_rows(file: Path) -> None:
    """Writes the rows. The answer to a row is the image's colour."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    rows = []
    for number in range(ROW_COUNT):
        name, colour = tuple(COLOURS.items())[number % len(COLOURS)]
        content = io.BytesIO()
        image = Image.new("RGB", (SIDE + WIDER * (number % 5), SIDE), colour)
        image.paste((0, 0, 0), (number % 25 * 16, number // 25 * 16, number % 25 * 16 + 16, number // 25 * 16 + 16))
        image.save(content, "PNG")  # the position of the black square makes each row's item unique
        images = [{"bytes": content.getvalue(), "path": None}]
        rows.append({"prompt": "<image>which colour?", "images": images, "answer": name})
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=64)


def main() -> None:
    """Writes the folder."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder)
    write_rows(folder / ROWS)


if __name__ == "__main__":
    main()
