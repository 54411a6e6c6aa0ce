"""What over-sampling gains where response lengths have a long tail: ``python -m benchmarks.over_sampling``.

Real runs of the tiny model with a temperature so high that it says its stop token by chance: lengths are geometric, up
to ``--max-new-tokens``, and the learning rate is too small to change them. Batches are small (8 prompts x 2 samples),
so that a decode step costs about the same with more samples, as on a GPU; with large ones on a CPU the additional
samples cost more than the tail. Each repeat runs every way once, so that a ratio holds on a loaded machine. Printed are
medians over the repeats: trained samples a second (all samples by all the time, without the first steps), its ratio to
the same staleness without over-sampling, tokens of a trained sample (who takes the first groups to finish takes short
ones), and the share of samples that were thrown away.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from relax_core.observe.records import ACTOR, by_step
from relax_core.observe.sinks import read_metrics

SKIPPED_STEPS = 10
DEADLINE_S = 900
KEEP = ("rollout.surplus=keep", "mode.on_stale=mask")
WAYS = {  # name → (its base, overrides)
    "s=0": ("s=0", ("mode.max_staleness=0",)),
    "s=0 x1.5 drop": ("s=0", ("mode.max_staleness=0", "rollout.over_sampling=1.5")),
    "s=0 x1.5 keep": ("s=0", ("mode.max_staleness=0", "rollout.over_sampling=1.5", *KEEP)),
    "s=0 x1.5 keep, abort": (
        "s=0",
        ("mode.max_staleness=0", "rollout.over_sampling=1.5", *KEEP, "rollout.partial=abort"),
    ),
    "s=1": ("s=1", ("mode.max_staleness=1",)),
    "s=1 x1.5 keep": ("s=1", ("mode.max_staleness=1", "rollout.over_sampling=1.5", *KEEP)),
}
COMMON = (
    "rollout.temperature=3.0",
    "algo.group_size=2",
    "optimizer.lr=1e-9",
    "eval.every=0",
    "run.save_every=0",
    "run.export_hf=false",
    "run.panel=false",
)

Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="train steps of a run")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    arguments = parser.parse_args()
    if arguments.steps <= 2 * SKIPPED_STEPS or arguments.repeats < 1:
        parser.error(f"--steps: more than {2 * SKIPPED_STEPS}; --repeats: 1 or more")
    found: dict[str, list[Figures]] = {name: [] for name in WAYS}
    for repeat in range(arguments.repeats):
        for name, (_, overrides) in WAYS.items():
            flags = (*overrides, f"run.steps={arguments.steps}", f"rollout.max_new_tokens={arguments.max_new_tokens}")
            found[name].append(figures_of_run((*COMMON, *flags, f"seed={repeat}")))
            print(f"repeat {repeat + 1}, {name}: {found[name][-1]}", flush=True)
    print(table(found))


def figures_of_run(overrides: tuple[str, ...]) -> Figures:
    with tempfile.TemporaryDirectory(prefix="relax-over-") as folder:
        run_dir = Path(folder) / "run"
        ended = subprocess.run(
            [sys.executable, "-m", "relax_core", *overrides, f"run.dir={run_dir}"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        if ended.returncode:
            raise SystemExit(f"the run {' '.join(overrides)} ended with {ended.returncode}:\n{ended.stderr[-4000:]}")
        steps = by_step(read_metrics(run_dir), ACTOR)
        books = json.loads((run_dir / "summary.json").read_text())["ledger"]
    measured = [steps[step] for step in sorted(steps)[SKIPPED_STEPS:]]
    samples = sum(one["samples"] for one in measured)
    return {
        "samples/s": 1e3 * samples / sum(one["step_ms"] for one in measured),
        "tokens": sum(one["tokens"] for one in measured) / samples,
        "dropped": sum(books["dropped"].values()) / books["issued"],
    }


def table(found: dict[str, list[Figures]]) -> str:
    """One row a way; the ratio is the median of the repeats' own."""
    lines = [f"{'':24}{'samples/s':>10}{'ratio':>8}{'tokens':>8}{'dropped':>9}"]
    for name, repeats in found.items():
        base = found[WAYS[name][0]]
        ratio = median(one["samples/s"] / of["samples/s"] for one, of in zip(repeats, base, strict=True))
        speed, tokens, dropped = (median(one[key] for one in repeats) for key in ("samples/s", "tokens", "dropped"))
        lines.append(f"{name:24}{speed:10.0f}{ratio:7.2f}×{tokens:8.1f}{100 * dropped:8.0f}%")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
