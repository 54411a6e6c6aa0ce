"""Checks from the files' headers alone whether a folder's weights fit its architecture.

It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from relax_core.families.architecture import Architecture
from relax_core.families.folder import weight_files
from relax_core.families.hf_config import described_parts, read_hf_config
from relax_core.train.hf.stored_weights import stored_weights
from relax_core.weights.safetensors_stream import stored_bytes


def stored_shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...], Path]]:
    """Yields (name, shape, file) of every weight of a folder; raises ValueError if a file cannot be read."""
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                    yield name, tuple(file.get_slice(name).get_shape()), path
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}. Download it again.") from error


def passed_bytes(folder: Path, passed: tuple[str, ...]) -> int:
    """Returns the bytes of a folder's tensors whose names begin with one of ``passed``, from the files' headers."""
    if not passed:
        return 0
    stored = (one for path in weight_files(folder) for one in stored_bytes(path))
    return sum(one.nbytes for name, one in stored if name.startswith(passed))


def weight_problems(folder: Path, architecture: Architecture) -> list[str]:
    """Returns one sentence for each reason why the trainer cannot load the folder, or an empty list."""
    stored = {one.name: one for one in stored_weights(architecture)}
    ignored = architecture.ignored_weights
    problems, found, passed = [], dict[str, Path](), set[str]()
    try:
        for name, shape, path in stored_shapes(folder):
            if architecture.passes(name):
                passed.add(name.split(".")[0])
            if name in ignored or architecture.passes(name):
                continue
            if name not in stored:
                problems.append(f"{path}: {name} is not a weight of family {architecture.family}.")
            elif name in found:
                problems.append(f"{path}: {name} is also in {found[name]}.")
            elif stored[name].problem(shape) is not None:
                problems.append(f"{path}: {name} has shape {shape}; config.json requires {stored[name].shape}.")
            found[name] = path
    except ValueError as error:
        return [*problems, str(error)]
    if not found:
        return [f"{folder} has no *.safetensors file. Give a Hugging Face folder with weights."]
    described = described_parts(read_hf_config(folder)) if architecture.passed else ()
    for part in described:
        if part not in passed and f"{part}." in architecture.passed:
            problems.append(
                f"{folder}: config.json describes {part}, and no file has its weights, so no export could keep them. "
                "Fetch the folder again, or set enable_audio_output to false in its config.json."
            )
    missing = [name for name in stored if name not in found]
    if missing:
        problems.append(f"{folder}: {len(missing)} of {len(stored)} weights are missing: {', '.join(missing[:3])} …")
    return problems
