"""Lists GPU models with the figures of their data sheets, and finds the memory of a run's GPUs.

``flops`` is the dense bfloat16 rate (data sheets also give the doubled rate of sparse matrices). Rates of links are for
one direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relax_core.config.choices import GpuName
from relax_core.config.schema import PlacementConfig

_T, _G = 1e12, 1e9
_PCIE_4, _PCIE_5 = 32 * _G, 64 * _G  # 16 lanes


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """Holds the figures of a GPU.

    ``memory_gib`` is its memory as the driver or torch reports it. ``flops`` are dense bfloat16 operations per second.
    In bytes per second and direction, ``bandwidth`` is the rate of its memory, ``link`` of the links to the other GPUs
    of its machine, ``host`` of the link to the host's memory, and ``network`` of its share of the machine's network.
    ``source`` names the data sheet.
    """

    memory_gib: float
    flops: float
    bandwidth: float
    link: float
    host: float
    network: float
    source: str


# The network is that of NVIDIA's DGX systems: a port of 400 Gbit/s for each GPU of a DGX H100, of 200 Gbit/s in a
# DGX A100. For GPUs without such a system a port of 100 Gbit/s is assumed.
_DGX_H100, _DGX_A100, _ASSUMED = 50 * _G, 25 * _G, 12.5 * _G

GPU_MODELS: Mapping[GpuName, GpuModel] = {
    GpuName.h100: GpuModel(
        memory_gib=79.6,
        flops=989.4 * _T,
        bandwidth=3350 * _G,
        link=450 * _G,
        host=_PCIE_5,
        network=_DGX_H100,
        source="NVIDIA H100 data sheet, SXM",
    ),
    GpuName.h200: GpuModel(
        memory_gib=139.8,
        flops=989.4 * _T,
        bandwidth=4800 * _G,
        link=450 * _G,
        host=_PCIE_5,
        network=_DGX_H100,
        source="NVIDIA H200 data sheet, SXM",
    ),
    GpuName.b200: GpuModel(
        memory_gib=179.1,
        flops=2250 * _T,
        bandwidth=8000 * _G,
        link=900 * _G,
        host=_PCIE_5,
        network=_DGX_H100,
        source="NVIDIA DGX B200 data sheet",
    ),
    GpuName.gb200: GpuModel(
        memory_gib=185.0,
        flops=2500 * _T,
        bandwidth=8000 * _G,
        link=900 * _G,
        host=450 * _G,
        network=_DGX_H100,
        source="NVIDIA GB200 NVL72 data sheet; the link of a rack reaches 72 GPUs",
    ),
    GpuName.h20: GpuModel(
        memory_gib=95.6,
        flops=148 * _T,
        bandwidth=4000 * _G,
        link=450 * _G,
        host=_PCIE_5,
        network=_DGX_H100,
        source="reports of its specification; NVIDIA publishes no data sheet",
    ),
    GpuName.a100: GpuModel(
        memory_gib=79.2,
        flops=312 * _T,
        bandwidth=2039 * _G,
        link=300 * _G,
        host=_PCIE_4,
        network=_DGX_A100,
        source="NVIDIA A100 data sheet, SXM 80 GB",
    ),
    GpuName.l40s: GpuModel(
        memory_gib=44.4,
        flops=362 * _T,
        bandwidth=864 * _G,
        link=_PCIE_4,
        host=_PCIE_4,
        network=_ASSUMED,
        source="NVIDIA L40S data sheet",
    ),
    GpuName.a6000: GpuModel(
        memory_gib=47.5,
        flops=154.8 * _T,
        bandwidth=768 * _G,
        link=_PCIE_4,
        host=_PCIE_4,
        network=_ASSUMED,
        source="NVIDIA RTX A6000 data sheet, Ampere GA102 white paper",
    ),
    GpuName.l4: GpuModel(
        memory_gib=22.0,
        flops=121 * _T,
        bandwidth=300 * _G,
        link=_PCIE_4,
        host=_PCIE_4,
        network=_ASSUMED,
        source="NVIDIA L4 data sheet",
    ),
    GpuName.a10: GpuModel(
        memory_gib=22.0,
        flops=125 * _T,
        bandwidth=600 * _G,
        link=_PCIE_4,
        host=_PCIE_4,
        network=_ASSUMED,
        source="NVIDIA A10 data sheet",
    ),
    GpuName.rtx_4090: GpuModel(
        memory_gib=23.6,
        flops=165.2 * _T,
        bandwidth=1008 * _G,
        link=_PCIE_4,
        host=_PCIE_4,
        network=_ASSUMED,
        source="NVIDIA Ada GPU architecture white paper; rate with float32 sums",
    ),
}


def gpu_memory_gib(placement: PlacementConfig) -> float:
    """Returns the memory of one GPU in GiB; 0 if neither placement.gpu_memory_gib nor placement.gpu is set."""
    if placement.gpu_memory_gib is not None:
        return placement.gpu_memory_gib
    return 0.0 if placement.gpu is None else GPU_MODELS[placement.gpu].memory_gib


def find_gpu_model(device: str) -> GpuName | None:
    """Returns the model of a GPU by the name that torch reports, such as "NVIDIA H100 80GB HBM3"; None if unknown."""
    words = f" {device.upper().replace('-', ' ')} "
    return next((name for name in GpuName if f" {name.value.upper().replace('_', ' ')} " in words), None)
