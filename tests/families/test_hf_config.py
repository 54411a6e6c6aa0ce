"""One module reads a model's config.json."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from relax_core.families.hf_config import end_token_ids, read_hf_config

ROOT = Path(__file__).resolve().parents[2]
READER = "relax_core/families/hf_config.py"
# Modules that need the file's name, though they do not read it → why.
NAME_ONLY = {
    "relax_core/data/tokenizer_trial.py": "sizes and times of a folder's files say whether its trial still holds",
    "relax_core/plan/data_check.py": "size and time of the file say whether a kept check of the data still holds",
    "relax_core/tools/tiny_media.py": "a builtin model that sees gets a config.json as published",
    "relax_core/train/hf/hf_export.py": "an exported folder gets a config.json with the dtype of its weights",
}


def test_one_module_names_the_file() -> None:
    named, imported = set(), set()
    for file in sorted((ROOT / "relax_core").rglob("*.py")):
        module = file.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = node.value.split("/")
                if parts[-1] in ("config.json", "generation_config.json"):
                    named.add(module)
            if isinstance(node, ast.ImportFrom) and any(alias.name == "CONFIG_FILE" for alias in node.names):
                imported.add(module)
    assert named == {READER}
    assert imported == set(NAME_ONLY)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "config.json is not JSON"), ("[1]", "config.json is not a JSON object"), (None, "no config.json there")],
)
def test_a_broken_file_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_hf_config(tmp_path)


def test_end_tokens_come_from_two_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert end_token_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 3]}))
    assert end_token_ids(tmp_path) == (3, 7, 9)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert end_token_ids(tmp_path) == (3, 9)
