"""Lists the layouts of a worker group of four ranks that keeps its processes and changes its layout."""

from __future__ import annotations

from typing import Any

from relax_core.config.choices import Recompute
from relax_core.config.schema import ParallelConfig

RANKS = 4
DENSE_LAYOUTS: dict[str, dict[str, int]] = {
    "dp4": {"dp": 4},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_cp2": {"tp": 2, "cp": 2},
    "pp2_vpp2_dp2": {"pp": 2, "vpp": 2, "dp": 2},
    "pp4": {"pp": 4},
}
MOE_LAYOUTS: dict[str, dict[str, int]] = {
    "tp2_ep4": {"tp": 2, "dp": 2, "ep": 4},
    "tp2_ep2_etp2": {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
    "pp2_ep2": {"pp": 2, "dp": 2, "ep": 2},
    "tp2_pp2_vpp2_ep2": {"tp": 2, "pp": 2, "vpp": 2, "ep": 2},
}
VISION_LAYOUTS = {name: DENSE_LAYOUTS[name] for name in ("tp2_pp2", "tp2_cp2", "pp2_vpp2_dp2")}
VISION_MOE_LAYOUTS = {name: MOE_LAYOUTS[name] for name in ("tp2_ep4", "tp2_ep2_etp2", "pp2_ep2")}


def parallel_config(**sizes: Any) -> ParallelConfig:
    return ParallelConfig(
        **{
            **dict.fromkeys(("dp", "tp", "pp", "vpp", "cp", "ep", "etp"), 1),
            "sequence_parallel": sizes.get("tp", 1) > 1,
            "recompute": Recompute.none,
            "distributed_optimizer": False,
            "overlap": False,
            "micro_batch_tokens": 8192,
            "micro_batch_patches": 8192,
            "logprob_chunk_tokens": 1024,
            "threads_per_rank": 1,
            **sizes,
        }
    )
