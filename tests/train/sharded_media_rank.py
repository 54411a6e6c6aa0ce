"""Runs one rank of each case twice: with complete towers and equal stages, and with the changes of the case.

Writes the differences of the two runs. The cases are multimodal models in the layouts of `CASES`.

python sharded_media_rank.py <rank> <ranks> <port> <folder of the models>
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.parity_data import with_rollout
from benchmarks.parity_media import DENSE, HYBRID
from benchmarks.parity_media_ranks import groups_of, settings_of, steps
from benchmarks.parity_omni import OMNI
from benchmarks.parity_ranks import make_backend
from relax_core.config.choices import Recompute
from relax_core.contracts.media_file import FolderReader
from relax_core.contracts.tree import TokenTree
from relax_core.train import process_group
from relax_core.train.micro_batches import pack_tree

SEQUENCE = {"sequence_parallel": True}
SHARED = {"distributed_optimizer": True}  # the test then compares only weights, not gradients
OVERLAP = {**SHARED, "overlap": True}
DEALT = {"shard_media": True}
FROZEN = {"frozen": ("vision", "projector")}
ALL_FROZEN = {"frozen": ("vision", "audio", "projector")}
# Name: ranks, family, layout, changes of the layout, further arguments of the backend.
CASES: dict[str, tuple[int, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "TP2": (2, DENSE, {"tp": 2}, DEALT, {}),
    "TP2, SP, overlap": (2, DENSE, {"tp": 2, **SEQUENCE, **OVERLAP}, DEALT, {}),
    "TP2, SP, EP2, recompute": (2, OMNI, {"tp": 2, "ep": 2, **SEQUENCE, "recompute": Recompute.full}, DEALT, {}),
    "TP2, SP, vision frozen": (2, OMNI, {"tp": 2, **SEQUENCE, **SHARED}, DEALT, FROZEN),
    "TP2, SP, towers frozen": (2, OMNI, {"tp": 2, **SEQUENCE, **SHARED}, DEALT, ALL_FROZEN),
    "CP2": (2, OMNI, {"cp": 2}, DEALT, {}),
    "CP2, overlap": (2, DENSE, {"cp": 2, **OVERLAP}, DEALT, {}),
    "PP2, first stage of 3": (2, DENSE, {"pp": 2}, {"first_stage_layers": 3}, {}),
    "PP2, VPP2, first stage of 2": (2, HYBRID, {"pp": 2, "vpp": 2}, {"first_stage_layers": 2}, {}),
    "TP2, CP2": (4, DENSE, {"tp": 2, "cp": 2}, DEALT, {}),
    "TP2, SP, CP2": (4, OMNI, {"tp": 2, "cp": 2, **SEQUENCE}, DEALT, {}),
    "TP2, SP, PP2, first stage of 2": (
        4, OMNI, {"tp": 2, "pp": 2, **SEQUENCE}, {**DEALT, "first_stage_layers": 2}, {},
    ),
    "DP2, TP2, overlap": (4, DENSE, {"dp": 2, "tp": 2, **OVERLAP}, DEALT, {}),
}  # fmt: skip
EXPORTED = "TP2, SP, PP2, first stage of 2"


def passed(backend: Any, group: TokenTree) -> int:
    """Returns how many of a group's items pass through this rank's towers."""
    layout = pack_tree([group], towers=backend._towers)
    rows = backend._sharding.padded(len(layout.token_ids))
    found = None if backend._media is None else backend._media.inputs(layout, padded_rows=rows)
    return 0 if found is None else len(found.inputs.frames) + len(found.inputs.sounds)


def main(rank: int, ranks: int, port: int, folder: Path, names: list[str]) -> None:
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    reader, seen = FolderReader(folder / "media"), {}
    for name, (needed, family, layout, changed, settings) in CASES.items():
        if needed != ranks or name not in names:
            continue
        build = partial(
            make_backend,
            folder,
            family=family,
            rank=rank,
            ranks=ranks,
            port=port,
            media=reader,
            optimizer=replace(settings_of(family), clip_grad=0.0),
            **settings,
        )
        groups = groups_of(folder, family, "mixed", "tree")
        whole = build(layout=layout)
        replica = parallel_state.get_data_parallel_rank()
        groups = with_rollout(groups, whole.logprobs(groups))
        expected = steps(whole, groups, replica=replica, layout=layout)
        dealt = build(layout={**layout, **changed})
        found = steps(dealt, groups, replica=replica, layout=layout)
        seen[name] = {}
        if rank == 0:
            seen[name] = found.difference(expected)
            largest = (float(gradient.abs().max()) for gradient in expected.gradients.values())
            seen[name]["largest gradient"] = max(largest, default=0.0)
        seen[name]["items"] = [len({medium.item.digest for medium in group.media}) for group in groups]
        seen[name]["passed"] = [passed(dealt, group) for group in groups]
        process_group.leave()
    (folder / f"{ranks}.{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), json.loads(sys.argv[5]))
