"""Exports a checkpoint of any layout as a Hugging Face folder, in one process without Megatron and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from relax_core.families.folder import family_key, folder_architecture
from relax_core.train.checkpoints.checkpoint_errors import read_errors_as_valueerror
from relax_core.train.checkpoints.checkpoint_shards import WEIGHTS, StoredFolder
from relax_core.train.checkpoints.provenance import check_same_numbers, model_numbers, read_provenance
from relax_core.train.hf.hf_export import SHARD_BYTES, export_hf_folder
from relax_core.train.hf.stored_weights import fused, stored_weights

BUCKET_BYTES = 64 << 20


def export_checkpoint(
    checkpoint: Path,
    target: Path,
    *,
    model_folder: Path,
    family: str | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes ``target`` as `export_hf_folder` does, with 64 MiB or one tensor in memory, and never replaces a folder.

    ``checkpoint`` is a model's part of a checkpoint and has provenance.json. ``model_folder`` gives the configuration
    and the tokenizer. ``family`` is the name or file of a further family. ``dtype`` is "float32" or "bfloat16", or None
    for that of each tensor in ``model_folder``. Raises ValueError for a checkpoint that is corrupt, of a different
    model than the folder's, or a critic's, and OSError if ``target`` cannot be written.
    """
    provenance = read_provenance(checkpoint)
    if provenance.head != "policy":
        raise ValueError(f"checkpoint {checkpoint} is of a {provenance.head}: Hugging Face knows no such model.")
    architecture = folder_architecture(
        model_folder, family=family_key(provenance.family, also=family) or provenance.family
    )
    check_same_numbers(provenance.model, model_numbers(architecture), folder=checkpoint)
    with read_errors_as_valueerror(checkpoint):
        stored = StoredFolder(checkpoint)

    weights = stored_weights(architecture)
    names = [WEIGHTS + rule.hf for weight in weights for rule in weight.rules]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        with read_errors_as_valueerror(checkpoint):
            for name, tensor in stored.read(names, bucket_bytes=BUCKET_BYTES):
                yield name.removeprefix(WEIGHTS), tensor
                del tensor  # This frees the tensor before the next ones are read.

    export_hf_folder(
        fused(tensors(), weights),
        shapes={weight.name: weight.shape for weight in weights},
        own_dtype=provenance.dtype,
        dtype=dtype,
        source_folder=model_folder,
        target=target,
        shard_bytes=shard_bytes,
        passed=architecture.passed,
        replace=False,
    )
