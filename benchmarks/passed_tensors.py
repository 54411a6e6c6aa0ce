"""Measures the memory of an export beside large tensors that Relax does not compute and copies from file to file.

    python -m benchmarks.passed_tensors [--gigabytes 10] [--folder /tmp]

A checkpoint of a tiny random Qwen3-Omni is exported; its folder has a talker of so many gigabytes in files of 2.5 GB,
one of its tensors of 1 GB. Printed is the peak of the process's resident memory over what it had before the export,
mapped files included, and the same of an export whose folder has no such talker. The files are removed at the end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.logprobs import memory_mb
from benchmarks.parity_omni import OMNI, make_omni_model
from relax_core.contracts.engine import TensorSpec
from relax_core.families.folder import WEIGHT_INDEX
from relax_core.weights.safetensors_stream import header_bytes, stored_bytes, write_weight_index
from tests.trees import answers_tree

FILE_BYTES, TENSOR_BYTES, LARGEST_BYTES = 2_500_000_000, 50_000_000, 1_000_000_000
REACH_MB = 256.0


def add_talker(folder: Path, *, nbytes: int) -> None:
    """Writes further files with tensors of random bytes, and the index that names them and the model's own file."""
    files: dict[str, list[TensorSpec]] = {}
    whole = folder / "model.safetensors"
    files[whole.name] = [
        TensorSpec(name=name, dtype=one.dtype, shape=list(one.shape), offset=0, nbytes=one.nbytes)
        for name, one in stored_bytes(whole)
    ]
    block = np.random.default_rng(0).bytes(TENSOR_BYTES)
    left, number = nbytes, 0
    while left > 0:
        specs = list(_layout(min(left, FILE_BYTES), number))
        number += 1
        with (folder / f"talker-{number}.safetensors").open("wb") as file:
            file.write(header_bytes(specs))
            for spec in specs:
                for first in range(0, spec.nbytes, TENSOR_BYTES):
                    file.write(block[: spec.nbytes - first])
        files[f"talker-{number}.safetensors"] = specs
        left -= FILE_BYTES
    write_weight_index(folder / WEIGHT_INDEX, files)


def _layout(nbytes: int, number: int) -> Iterator[TensorSpec]:
    offset = 0
    while offset < nbytes:
        size = min(nbytes - offset, LARGEST_BYTES if not number and not offset else TENSOR_BYTES)
        name = f"talker.large.{number}.{offset // TENSOR_BYTES}.weight"
        yield TensorSpec(name=name, dtype="bfloat16", shape=[size // 2], offset=offset, nbytes=size)
        offset += size


def export_memory(checkpoint: Path, folder: Path, target: Path) -> tuple[float, float]:
    """Returns the memory in MiB above idle at its peak, and the seconds of an export."""
    from relax_core.train.hf.hf_export import export_checkpoint

    idle, start = memory_mb("VmRSS"), time.perf_counter()
    export_checkpoint(checkpoint, target, model_folder=folder)
    return memory_mb("VmHWM") - idle, time.perf_counter() - start


def save_checkpoint(folder: Path, target: Path) -> None:
    """Saves the model of a folder as one rank does after a step over text."""
    from benchmarks.one_rank import one_rank_setup
    from relax_core.train.policy_backend import MegatronBackend

    backend = MegatronBackend(one_rank_setup(folder, family=OMNI), temperature=1.0)
    tokens = np.ones(8, dtype=np.float32)
    backend.begin_step(0)
    backend.accumulate([answers_tree("g", np.arange(4), [4, 4], np.arange(8), logprobs=-tokens, advantages=tokens)])
    backend.finish_step()
    backend.save(target)


def measure(scratch: Path, *, nbytes: int) -> None:
    """Prints the memory of both exports, each in a process of its own."""
    make_omni_model(scratch / "model")
    save_checkpoint(scratch / "model", scratch / "checkpoint")
    for name, size in (("without a large talker", 0), ("with it", nbytes)):
        if size:
            add_talker(scratch / "model", nbytes=size)
        command = [sys.executable, "-m", "benchmarks.passed_tensors", "--export", str(scratch)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=3600)
        peak, seconds = map(float, ended.stdout.split())
        written = sum(file.stat().st_size for file in (scratch / "hf").glob("*.safetensors"))
        print(f"{name:24}{written / 1e9:8.2f} GB written {peak:8.0f} MiB above idle {seconds:8.1f} s", flush=True)
    print(f"to reach: {REACH_MB:.0f} MiB")


def main() -> None:
    """Runs the benchmark, or one export of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--folder", type=Path, default=None, help="where the files are made; twice the size is free")
    parser.add_argument("--export", type=Path, default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.export is not None:
        scratch = arguments.export
        print(*export_memory(scratch / "checkpoint", scratch / "model", scratch / "hf"))
        return
    with tempfile.TemporaryDirectory(prefix="relax-passed-", dir=arguments.folder) as name:
        measure(Path(name), nbytes=int(arguments.gigabytes * 1e9))


if __name__ == "__main__":
    main()
