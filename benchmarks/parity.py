"""Compares train steps of every parallel layout with a single process, and the single process with Hugging Face.

    python -m benchmarks.parity [--media] [--json FILE] [--only NAME …] [--cases CASE …]

It trains tiny models for two steps in float32 on 1, 2 and 4 gloo ranks, with tree packing (groups share their prompt)
and plain packing (each sample is a group). Prompts and responses have different lengths and fill several micro-batches;
the last micro-batch has no group for the second replica. The table has the largest absolute differences of the loss, of
the log-probs before and after the steps, and of the final weights. It also has the largest relative difference of the
gradient norm. Recorded results are in benchmarks/results/parity.json and parity_media.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

REACH = 1e-5
DEADLINE_S = 3600.0
FIGURES = ("loss", "grad_norm", "weights", "logprobs")
MEDIA_REACH = 2e-5
MEDIA_FIGURES = (*FIGURES, "gradients", "each_gradient")
DENSE, EXPERTS, BIASED = "qwen3", "qwen3_moe", "qwen2"
SEES, SEES_EXPERTS, HEARS = "qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe"
HYBRID, HYBRID_EXPERTS = "qwen3_5", "qwen3_5_moe"
OTHERS = ("llama", "mistral")  # families that are compared with Hugging Face only
SHARDED = {"distributed_optimizer": True}
OVERLAP = {**SHARDED, "overlap": True}
SEQUENCE = {"sequence_parallel": True}
DEALT = {"shard_media": True}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Defines a layout by its differences from the layout of one rank.

    Without ``trainable`` the layout computes log-probs only, like a reference. With ``kept`` the layout is also tested
    with kept sets (the tokens that top-p, top-k and min-p keep) and a banned token.
    """

    name: str
    layout: Mapping[str, Any]
    family: str = DENSE
    trainable: bool = True
    kept: bool = False

    @property
    def packings(self) -> tuple[str, ...]:
        """Returns the packings. "balanced" computes the loss per micro-batch, so it needs whole micro-batches."""
        kept = ("kept",) if self.kept else ()
        if self.family in (SEES, SEES_EXPERTS):
            return "tree", "plain", *(("replay",) if self.family == SEES_EXPERTS else ())
        if self.family in (HEARS, HYBRID, HYBRID_EXPERTS):
            return "tree", *(() if self.family == HYBRID else ("replay",))
        if self.family == DENSE:
            return "tree", "plain", *kept
        if self.family == BIASED:
            return "tree", *kept
        whole = self.trainable and "dp" not in self.layout
        return "tree", "plain", "replay", *(("balanced",) if whole else ()), *kept

    @property
    def ranks(self) -> int:
        ranks = 1
        for key in ("dp", "tp", "pp", "cp"):
            ranks *= self.layout.get(key, 1)
        return ranks


def _recompute(what: str) -> dict[str, Any]:
    from relax_core.config.choices import Recompute

    return {"recompute": Recompute(what)}


ROWS = (
    Row(name="DP2", layout={"dp": 2}, kept=True),
    Row(name="DP2, distributed optimizer", layout={"dp": 2, **SHARDED}),
    Row(name="DP2, distributed optimizer, overlap", layout={"dp": 2, **OVERLAP}),
    Row(name="TP2", layout={"tp": 2}, kept=True),
    Row(name="TP2, SP", layout={"tp": 2, **SEQUENCE}, kept=True),
    Row(name="TP2, full recompute", layout={"tp": 2, **_recompute("full")}),
    Row(name="TP2, SP, selective recompute", layout={"tp": 2, **SEQUENCE, **_recompute("selective")}),
    Row(name="PP2", layout={"pp": 2}),
    Row(name="PP2, VPP2", layout={"pp": 2, "vpp": 2}, kept=True),
    Row(name="PP2, VPP2, full recompute", layout={"pp": 2, "vpp": 2, **_recompute("full")}),
    Row(name="PP2, VPP2, experts", layout={"pp": 2, "vpp": 2}, family=EXPERTS),
    Row(name="CP2", layout={"cp": 2}, kept=True),
    Row(name="CP2, distributed optimizer, overlap", layout={"cp": 2, **OVERLAP}),
    Row(name="EP2", layout={"dp": 2, "ep": 2}, family=EXPERTS, kept=True),
    Row(name="EP2, distributed optimizer, overlap", layout={"dp": 2, "ep": 2, **OVERLAP}, family=EXPERTS),
    Row(name="ETP2", layout={"dp": 2, "etp": 2}, family=EXPERTS),
    Row(name="TP2, SP, EP2", layout={"tp": 2, "ep": 2, **SEQUENCE}, family=EXPERTS, kept=True),
    Row(name="TP2, SP, ETP2, full recompute", layout={"tp": 2, "etp": 2, **SEQUENCE, **_recompute("full")},
        family=EXPERTS),
    Row(name="TP2, EP2, log-probs only", layout={"tp": 2, "ep": 2}, family=EXPERTS, trainable=False, kept=True),
    Row(name="TP2, ETP2, log-probs only", layout={"tp": 2, "etp": 2}, family=EXPERTS, trainable=False),
    Row(name="TP2, PP2", layout={"tp": 2, "pp": 2}, kept=True),
    Row(name="TP2, SP, PP2, VPP2", layout={"tp": 2, "pp": 2, "vpp": 2, **SEQUENCE}),
    Row(name="TP2, CP2", layout={"tp": 2, "cp": 2}, kept=True),
    Row(name="TP2, SP, CP2", layout={"tp": 2, "cp": 2, **SEQUENCE}, kept=True),
    Row(name="PP2, CP2", layout={"pp": 2, "cp": 2}),
    Row(name="DP2, PP2, distributed optimizer, overlap", layout={"dp": 2, "pp": 2, **OVERLAP}, kept=True),
    Row(name="DP2, PP2, VPP2, distributed optimizer, overlap", layout={"dp": 2, "pp": 2, "vpp": 2, **OVERLAP}),
    Row(name="PP2, EP2", layout={"dp": 2, "pp": 2, "ep": 2}, family=EXPERTS),
    Row(name="PP2, VPP2, EP2", layout={"dp": 2, "pp": 2, "vpp": 2, "ep": 2}, family=EXPERTS),
    Row(name="TP2, SP, CP2, EP2", layout={"tp": 2, "cp": 2, "ep": 2, **SEQUENCE}, family=EXPERTS),
    Row(name="TP2, SP, CP2, EP4", layout={"tp": 2, "cp": 2, "ep": 4, **SEQUENCE}, family=EXPERTS),
    Row(name="qwen2: DP2, distributed optimizer, overlap", layout={"dp": 2, **OVERLAP}, family=BIASED),
    Row(name="qwen2: TP2", layout={"tp": 2}, family=BIASED),
    Row(name="qwen2: TP2, SP, selective recompute", layout={"tp": 2, **SEQUENCE, **_recompute("selective")},
        family=BIASED),
    Row(name="qwen2: PP2", layout={"pp": 2}, family=BIASED),
    Row(name="qwen2: PP2, VPP2, full recompute", layout={"pp": 2, "vpp": 2, **_recompute("full")}, family=BIASED),
    Row(name="qwen2: CP2, distributed optimizer, overlap", layout={"cp": 2, **OVERLAP}, family=BIASED),
    Row(name="qwen2: TP2, log-probs only", layout={"tp": 2}, family=BIASED, trainable=False),
    Row(name="qwen2: TP2, SP, PP2, VPP2", layout={"tp": 2, "pp": 2, "vpp": 2, **SEQUENCE}, family=BIASED),
    Row(name="qwen2: TP2, SP, CP2", layout={"tp": 2, "cp": 2, **SEQUENCE}, family=BIASED),
    Row(name="qwen2: DP2, PP2, distributed optimizer, overlap", layout={"dp": 2, "pp": 2, **OVERLAP}, family=BIASED),
)  # fmt: skip


_SEEING_ROWS = (
    Row(name="DP2", layout={"dp": 2}, family=SEES),
    Row(name="DP2, distributed optimizer, overlap", layout={"dp": 2, **OVERLAP}, family=SEES),
    Row(name="TP2", layout={"tp": 2}, family=SEES),
    Row(name="TP2, SP", layout={"tp": 2, **SEQUENCE}, family=SEES),
    Row(name="TP2, SP, full recompute", layout={"tp": 2, **SEQUENCE, **_recompute("full")}, family=SEES),
    Row(name="TP2, SP, selective recompute", layout={"tp": 2, **SEQUENCE, **_recompute("selective")}, family=SEES),
    Row(name="PP2", layout={"pp": 2}, family=SEES),
    Row(name="PP2, full recompute", layout={"pp": 2, **_recompute("full")}, family=SEES),
    Row(name="PP2, VPP2", layout={"pp": 2, "vpp": 2}, family=SEES),
    Row(name="CP2", layout={"cp": 2}, family=SEES),
    Row(name="CP2, distributed optimizer, overlap", layout={"cp": 2, **OVERLAP}, family=SEES),
    Row(name="EP2", layout={"dp": 2, "ep": 2}, family=SEES_EXPERTS),
    Row(name="EP2, distributed optimizer, overlap", layout={"dp": 2, "ep": 2, **OVERLAP}, family=SEES_EXPERTS),
    Row(name="TP2, SP, EP2", layout={"tp": 2, "ep": 2, **SEQUENCE}, family=SEES_EXPERTS),
    Row(name="TP2, SP, ETP2, full recompute", layout={"tp": 2, "etp": 2, **SEQUENCE, **_recompute("full")},
        family=SEES_EXPERTS),
    Row(name="TP2, PP2", layout={"tp": 2, "pp": 2}, family=SEES),
    Row(name="TP2, SP, PP2, VPP2", layout={"tp": 2, "pp": 2, "vpp": 2, **SEQUENCE}, family=SEES),
    Row(name="TP2, CP2", layout={"tp": 2, "cp": 2}, family=SEES),
    Row(name="TP2, SP, CP2", layout={"tp": 2, "cp": 2, **SEQUENCE}, family=SEES),
    Row(name="DP2, PP2, VPP2, distributed optimizer, overlap", layout={"dp": 2, "pp": 2, "vpp": 2, **OVERLAP},
        family=SEES),
    Row(name="PP2, EP2", layout={"dp": 2, "pp": 2, "ep": 2}, family=SEES_EXPERTS),
    Row(name="TP2, SP, CP2, EP2", layout={"tp": 2, "cp": 2, "ep": 2, **SEQUENCE}, family=SEES_EXPERTS),
)  # fmt: skip

_DEALT_ROWS = (
    Row(name="Dealt: TP2", layout={"tp": 2, **DEALT}, family=SEES),
    Row(name="Dealt: TP2, SP, full recompute",
        layout={"tp": 2, **SEQUENCE, **DEALT, **_recompute("full")}, family=SEES),
    Row(name="Dealt: TP2, PP2", layout={"tp": 2, "pp": 2, **DEALT}, family=SEES),
    Row(name="Dealt, Omni: CP2", layout={"cp": 2, **DEALT}, family=HEARS),
    Row(name="Dealt, Omni: TP2, SP, EP2", layout={"tp": 2, "ep": 2, **SEQUENCE, **DEALT}, family=HEARS),
    Row(name="Dealt, Omni: TP2, SP, CP2, EP2", layout={"tp": 2, "cp": 2, "ep": 2, **SEQUENCE, **DEALT}, family=HEARS),
    Row(name="PP2, first stage of 2 layers", layout={"pp": 2, "first_stage_layers": 2}, family=SEES),
)  # fmt: skip


def _rows_of(prefix: str, *, dense: str, experts: str) -> Iterator[Row]:
    """Yields the layouts of the vision models, for another model family.

    Megatron does not train experts in some layouts. A family without a dense model leaves these layouts out.
    """
    for row in _SEEING_ROWS:
        family = experts if row.family == SEES_EXPERTS else dense
        tensor_parallel_rows = row.layout.get("tp", 1) > 1 and not row.layout.get("sequence_parallel")
        if not (dense == experts and tensor_parallel_rows):
            yield replace(row, name=f"{prefix}: {row.name}", family=family)


MEDIA_ROWS = (
    *_SEEING_ROWS,
    *_rows_of("Omni", dense=HEARS, experts=HEARS),
    *_rows_of("qwen3_5", dense=HYBRID, experts=HYBRID_EXPERTS),
    *_DEALT_ROWS,
)


def measure(rows: Sequence[Row], *, media: bool = False, cases: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Returns a dict with ``name``, ``packing`` and `FIGURES` for each layout, packing and Hugging Face comparison.

    ``cases`` are the media cases to compare with Hugging Face, by default all.
    """
    # Imported before the fork, because the import takes six seconds in each process.
    from benchmarks import parity_media_ranks, parity_ranks

    work = parity_media_ranks if media else parity_ranks
    with tempfile.TemporaryDirectory(prefix="relax-parity-") as name:
        folder = Path(name)
        # Text has few cases, so its comparison with Hugging Face is always complete.
        chosen = {"families": {row.family for row in rows}, "cases": cases} if media else {}
        _run_all(folder, [work.reference_main], [{"folder": folder, **chosen}])
        found = _read(folder / "1.jsonl")
        for ranks in sorted({row.ranks for row in rows}):
            port, mine = _free_port(), [row for row in rows if row.ranks == ranks]
            calls = [
                {"folder": folder, "rank": rank, "ranks": ranks, "port": port, "rows": mine} for rank in range(ranks)
            ]
            _run_all(folder, [work.rank_main] * ranks, calls)
            found += _read(folder / f"{ranks}.jsonl")
    return found


def _run_all(folder: Path, works: Sequence[Callable[..., None]], calls: Sequence[Mapping[str, Any]]) -> None:
    """Runs each call in a forked process. At the first failure ends all calls and raises its traceback."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=work, kwargs=call) for work, call in zip(works, calls, strict=True)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + DEADLINE_S
    try:
        while any(process.exitcode is None for process in processes):
            failed = [index for index, process in enumerate(processes) if process.exitcode]
            if failed or time.monotonic() > deadline:
                errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
                what = f"rank(s) {failed} failed" if failed else f"not done in {DEADLINE_S:g} s"
                raise RuntimeError(f"{len(processes)} ranks, {what}:\n" + "\n".join(errors))
            processes[0].join(timeout=0.05)
    finally:
        for process in processes:
            process.kill()
            process.join()
    failed = [index for index, process in enumerate(processes) if process.exitcode]
    if failed:
        errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
        raise RuntimeError(f"rank(s) {failed} failed:\n" + "\n".join(errors))


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert isinstance(port, int)
        return port


def table(found: Sequence[Mapping[str, Any]], *, media: bool = False) -> str:
    titles = [
        "Layout",
        "Packing",
        "loss",
        "gradient norm",
        "weights",
        "log-probs",
        *(["gradients", "each gradient"] if media else []),
    ]
    lines = [f"| {' | '.join(titles)} |", f"| {' | '.join(['---'] * len(titles))} |"]
    for result in found:
        names = MEDIA_FIGURES if media else FIGURES
        figures = " | ".join(f"{result[name]:.1e}" if name in result else "–" for name in names)
        lines.append(f"| {result['name']} | {result['packing']} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the results, as JSON")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these rows")
    parser.add_argument("--media", action="store_true", help="vision models, with images and videos")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="cases with media to compare; mixed is required")
    arguments = parser.parse_args()
    media = arguments.media
    rows = [row for row in (MEDIA_ROWS if media else ROWS) if not arguments.only or row.name in arguments.only]
    found = measure(rows, media=media, cases=arguments.cases or ())
    print(table(found, media=media))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    worst = max(float(result[name]) for result in found for name in MEDIA_FIGURES if name in result)
    print(f"\nlargest difference: {worst:.1e}; allowed: {MEDIA_REACH if media else REACH:.0e}")


if __name__ == "__main__":
    main()
