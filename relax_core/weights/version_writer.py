"""Writes the files of a weight version. All versions share one file with the frozen tensors.

With LoRA the frozen tensors are the base model, and the file of a version has only the factors.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from relax_core.contracts.engine import WeightManifest
from relax_core.families.folder import WEIGHT_INDEX
from relax_core.weights.lora_merge import factor_names
from relax_core.weights.safetensors_stream import write_weight_index

if TYPE_CHECKING:
    import torch

    from relax_core.weights.lora_merge import LoraFactors

WEIGHTS = "model.safetensors"
# With frozen tensors, a version has two files and an index, with Hugging Face's file names.
FROZEN, TRAINED = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FACTORS = "factors.safetensors"  # not a name of Hugging Face, because transformers would not add the factors
FROZEN_FOLDER = "frozen"
COMPANIONS = {".json", ".txt", ".model", ".jinja"}  # config, tokenizer and chat template


class VersionWriter:
    """Writes versions into folders below ``folder``; a version's folder loads as a Hugging Face model.

    ``frozen`` names the tensors that are the same in every version. Their file is written with the first version, and
    all versions link to this file. Each version also links to the config and the tokenizer in ``model_folder``. The
    folder of a version with LoRA factors has no link to the frozen tensors: only `read_weights` adds the factors.
    """

    def __init__(self, folder: Path, *, frozen: Collection[str], model_folder: Path | None) -> None:
        self._apart = folder / FROZEN_FOLDER
        self._names = frozenset(frozen)
        self._frozen: WeightManifest | None = None
        self._linked = [path for path in model_folder.iterdir() if _is_companion(path)] if model_folder else []
        self._header_room: int | None = None

    @property
    def has_frozen(self) -> bool:
        """Returns whether the file of the frozen tensors exists. Until then `write` needs the frozen tensors."""
        return self._frozen is not None

    def write(
        self,
        folder: Path,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        factors: Iterable[LoraFactors] | None = None,
    ) -> WeightManifest:
        """Writes a version into its ``folder`` and returns its manifest.

        ``factors`` are the LoRA factors of frozen tensors; they are read after ``tensors``. None is a version without
        LoRA. If the disk or the shared memory is full, OSError names the folder and its free bytes.
        """
        try:
            return self._write(folder, version, tensors, factors)
        except OSError as error:
            free = shutil.disk_usage(folder).free
            text = (
                f"weight version {version} was not written to {folder}: {error.strerror}. {free:,} bytes are free there"
            )
            raise OSError(error.errno, text) from error

    def _write(
        self,
        folder: Path,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        factors: Iterable[LoraFactors] | None,
    ) -> WeightManifest:
        from relax_core.weights.version_file import HEADER_ROOM, WeightFile  # imports torch

        scales: dict[str, float] = {}
        with ExitStack() as files:
            path = folder / (FACTORS if factors is not None else TRAINED if self._names else WEIGHTS)
            trained = files.enter_context(WeightFile(path, header_room=self._header_room or HEADER_ROOM))
            frozen = None
            if self._names and self._frozen is None:
                self._apart.mkdir(exist_ok=True)
                frozen = files.enter_context(WeightFile(self._apart / FROZEN))
            for name, tensor in tensors:
                if name not in self._names:
                    trained.add(name, tensor)
                elif frozen is not None:
                    frozen.add(name, tensor)
            for name, a, b, scale in factors or ():
                assert name in self._names, f"{name} has factors, so it must be frozen"
                for factor, tensor in zip(factor_names(name), (a, b), strict=True):
                    trained.add(factor, tensor)
                scales[name] = scale
            held = self._frozen if frozen is None else frozen.finish(version=version)
            manifest = trained.finish(version=version, frozen=held, factors=scales)
        if held is not None and self._frozen is None:
            assert len(held.tensors) == len(self._names), "each frozen name is that of a tensor"
        if held is not None and self._frozen is None and factors is None:
            write_weight_index(self._apart / WEIGHT_INDEX, {FROZEN: held.tensors, TRAINED: manifest.tensors})
            self._linked += [self._apart / FROZEN, self._apart / WEIGHT_INDEX]
        self._frozen, self._header_room = held, manifest.data_offset
        for source in self._linked:
            link = folder / source.name
            if not link.is_symlink():
                link.symlink_to(source)
        return manifest


def _is_companion(path: Path) -> bool:
    return path.suffix in COMPANIONS and not path.name.endswith(".index.json")
