"""Makes a folder of the example family in docs/plugins/vision_family.md: tiny Qwen3-VL with another model_type."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from relax_core.tools.make_tiny import tiny_model_folder

HOUSE_VL = Path(__file__).resolve().parents[1] / "examples" / "plugins" / "house_vl.py"


def of_the_house(folder: Path) -> Path:
    """Copies the tiny model with its warm start to ``folder`` and returns it."""
    shutil.copytree(tiny_model_folder("tiny_qwen3_vl", task="see"), folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "model_type": "house_vl"}))
    return folder
