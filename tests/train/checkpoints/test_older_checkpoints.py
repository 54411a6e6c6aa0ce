"""Tests that checkpoints written before 2026-11-22 are read, which name what made them differently."""

from __future__ import annotations

import json
from pathlib import Path

from relax_core.train.checkpoints.checkpoint_store import META, CheckpointStore
from relax_core.train.checkpoints.provenance import PROVENANCE, Provenance, read_provenance, write_provenance
from relax_core.weights.digested_json import encode_digested


def test_the_older_file_name_is_read(tmp_path: Path) -> None:
    provenance = Provenance(
        family="qwen3",
        head="policy",
        dtype="float32",
        model={"num_layers": 2},
        layout={"dp": 1},
        world_size=1,
        step=2,
        updates=2,
        time="2026-11-21T00:00:00+00:00",
        libraries={"torch": "2.0"},
    )
    write_provenance(provenance, tmp_path)
    (tmp_path / PROVENANCE).rename(tmp_path / "made_by.json")
    assert read_provenance(tmp_path) == provenance


def test_the_older_key_of_meta_is_read(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "weights").write_bytes(b"x")

    store = CheckpointStore(tmp_path, keep_last=3)
    folder = store.write(20, writers=write, meta={"config_digest": "d1"})
    content = json.loads((folder / META).read_text())["content"]
    content["made_by"] = content.pop("provenance")
    (folder / META).write_bytes(encode_digested(content))
    found = store.newest_whole()
    assert found is not None and found.folder == folder and found.meta.run == {"config_digest": "d1"}
