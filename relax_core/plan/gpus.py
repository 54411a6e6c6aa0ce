"""Checks whether this machine has the GPUs of a placement."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_core.config.choices import LauncherKind
from relax_core.config.errors import NotYet
from relax_core.config.schema import PlacementConfig, RelaxConfig
from relax_core.config.sections.launcher_schema import RayJobLauncherConfig, SlurmLauncherConfig

TORCH_S = 60.0  # seconds for an interpreter to import torch and to ask the driver
DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg")  # files of NVIDIA, AMD, and either of them under Windows
SMALLER = 0.97  # share of placement.gpu_memory_gib: torch reports slightly less than the driver
UNSEEN = (
    "placement=gpu: Relax has run on one GPU alone, with a trainer of a tiny model and the embedded engine. Several "
    "GPUs, SGLang on a GPU, the weights on their way to it and recovery on GPUs have been tested on CPU cores alone, "
    "and the plan's memory figures for a GPU are assumptions. "
    "Begin with a few steps of a small model, and watch its memory and the log-prob gap of engine and trainer."
)
_ASK_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
sizes = [torch.cuda.get_device_properties(number).total_memory for number in range(count)]
print(json.dumps({"torch": torch.__version__, "sizes": sizes}))
"""


@dataclass(frozen=True, kw_only=True)
class FoundGpus:
    """Describes the GPUs of this machine.

    ``device_files`` are the drivers' files in /dev. ``sizes`` are the bytes of memory of each GPU that torch can use.
    ``torch`` is its version, or why it could not be asked; it is empty if no driver was found.
    """

    device_files: Sequence[str] = ()
    sizes: Sequence[int] = ()
    torch: str = ""


def find_gpus(devices: Path = Path("/dev")) -> FoundGpus:
    """Looks for the drivers' files below ``devices``; if there are any, asks torch in a process of its own."""
    files = device_files(devices)
    if not files:
        return FoundGpus()
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_TORCH], capture_output=True, text=True, timeout=TORCH_S, check=False
        )
    except subprocess.TimeoutExpired:
        return FoundGpus(device_files=files, torch=f"which gave no answer in {TORCH_S:.0f} s")
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or ["without a word"])[-1]
        return FoundGpus(device_files=files, torch=f"which failed: {last}")
    told = json.loads(asked.stdout)
    return FoundGpus(device_files=files, sizes=told["sizes"], torch=told["torch"])


def device_files(devices: Path = Path("/dev")) -> list[str]:
    """Returns the drivers' files below ``devices``; a machine without a GPU has none."""
    return sorted(str(file) for pattern in DEVICE_FILES for file in devices.glob(pattern))


def gpu_problems(config: RelaxConfig) -> Iterator[str]:
    """Returns what keeps a start on GPUs from working, as far as this machine can tell.

    The GPUs of a joined Ray cluster are counted once it is joined, by
    `relax_core.roles.process.process_placement.cluster_fault`.
    """
    placement, launcher = config.placement, config.launcher
    if not placement.gpus_per_node:
        return
    if isinstance(launcher, SlurmLauncherConfig) or (isinstance(launcher, RayJobLauncherConfig) and launcher.manifest):
        if launcher.gpus_per_node < placement.gpus_per_node:
            yield (
                f"launcher.gpus_per_node={launcher.gpus_per_node} with placement.gpus_per_node="
                f"{placement.gpus_per_node}: the job would not get them. "
                f"Set launcher.gpus_per_node={placement.gpus_per_node}."
            )
    elif launcher.name is LauncherKind.local and launcher.ray_address is None:
        yield from machine_faults(placement, find_gpus())


def machine_faults(placement: PlacementConfig, found: FoundGpus) -> Iterator[NotYet]:
    """Returns what this machine lacks for a run with its own Ray. Such a run can still be planned."""
    wanted = f"placement.gpus_per_node={placement.gpus_per_node}"
    have = len(found.sizes)
    if placement.nodes > 1 and found.device_files:
        yield NotYet(
            f"placement.nodes={placement.nodes} with a Ray of the run's own, which is this machine alone. Add "
            "launcher.ray_address=auto, or choose launcher=slurm."
        )
    if not found.device_files:
        looked = ", ".join(f"/dev/{pattern}" for pattern in DEVICE_FILES)
        fix = "Choose placement=cpu."
        if placement.nodes > 1:
            wanted = f"placement.nodes={placement.nodes} {wanted}"
            fix = "Start it where the GPUs are, with launcher=slurm or launcher.ray_address=auto."
        yield NotYet(f"{wanted}, and this machine has no GPU: none of {looked} exists. {fix}")
    elif not have:
        yield NotYet(
            f"{wanted}, and this machine has {found.device_files[0]}, but no GPU is there for the torch of "
            f"{sys.executable} ({found.torch}): torch.cuda.is_available() is false. Install the build of torch that is "
            "for the driver's CUDA, and see that CUDA_VISIBLE_DEVICES leaves a GPU."
        )
    elif have < placement.gpus_per_node:
        yield NotYet(f"{wanted}, and torch finds {have} on this machine. Set placement.gpus_per_node={have}.")
    else:
        smallest = min(found.sizes) / (1 << 30)
        if smallest < SMALLER * placement.gpu_memory_gib:
            yield NotYet(
                f"placement.gpu_memory_gib={placement.gpu_memory_gib:g}, and the smallest GPU of this machine has "
                f"{smallest:.1f}. Set placement.gpu_memory_gib={smallest:.1f}."
            )
