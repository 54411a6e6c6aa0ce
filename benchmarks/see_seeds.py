"""Trains the tiny models that see and hear on several seeds, with controls and with a part of the model frozen.

    python -m benchmarks.see_seeds [--seeds 3] [--only NAME …] [--results FILE] [key=value …]

Each row of the table is one whole run on data=see or data=four_modalities; figures are held-out greedy accuracies by
part (chance 0.25). In a control, each row has the files of any row for the exchanged kinds, so only the other parts can
be learnt. "do they match?" asks about a picture and a tone (chance 0.5). The exit code is 1 if a run that may see ends
below 0.95, or a part of it below 0.9, or if an exchanged part of a control is above 0.33 or another part below 0.9, or
if a run with mode=colocate starts above 0.65; the first evaluation of others may contain answers of later versions. The
question of two kinds must reach 0.9 on all seeds but one, and its controls stay at 0.6 or below. What frozen runs
reach is only printed. In "dense, kills", a worker that encodes, the engine, the rollout and the trainer's rank get
SIGKILL, and the ledger's file must be exact. One run follows the other.
With ``--results``, each finished run is added to the file, and a run that the file has is not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.demo_seeds import DEADLINE_S, run_demo
from relax_core.config.media_schema import FOUR_MODALITIES, TONE_OF_PICTURE
from relax_core.data.generated import parts_of
from relax_core.data.tasks.modality_tasks import TONE
from relax_core.data.tasks.see_task import COLOUR, DIRECTION
from tests.integration.live_run import ENGINE, ROLLOUT, LiveRun

START_BOUND, GOAL, PART_GOAL, BLIND_BOUND = 0.65, 0.95, 0.9, 0.33
MOE = ("model=tiny_qwen3_vl_moe", "algo.routing_replay=true")
HYBRID_MOE = ("model=tiny_qwen3_5_moe", "algo.routing_replay=true")
OMNI = ("model=tiny_qwen3_omni", "algo.routing_replay=true")
# With 256 held-out rows, as the others have, one part in twenty would be above the bound by chance.
MORE_ROWS = ("data.eval_size=1024", "eval.rows=1024")
CONTROL = ("data.task=see_exchanged", *MORE_ROWS)

SGLANG_PYTHON = Path(".venv-sglang/bin/python")
# What gets SIGKILL, each after a train step.
KILLS = {2: "relax_core.data.media.encode_worker_main", 10: ENGINE, 25: ROLLOUT, 45: "ray::PolicyTrainer"}

HELD_OUT = "held-out"
PART_OF_KIND = {"image": COLOUR, "video": DIRECTION, "audio": TONE}
Figures = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    """Is one kind of run.

    ``blind`` are the columns in which a control must stay at ``blind_bound``. ``judged`` is false if the figures are
    only printed. Of several seeds, ``may_miss`` need not reach the bounds. ``needs`` is a file without which the kind
    is left out.
    """

    words: tuple[str, ...]
    data: str = "see"
    blind: tuple[str, ...] = ()
    blind_bound: float = BLIND_BOUND
    goal: float = GOAL
    judged: bool = True
    all_seeds: bool = True
    may_miss: int = 0
    kills: bool = False
    needs: Path | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Returns the parts of its task, each of which has a column."""
        tasks = [word.removeprefix("data.task=") for word in self.words if word.startswith("data.task=")]
        return parts_of(tasks[0] if tasks else self.data)


def _exchanged(*kinds: str) -> Case:
    """Returns a control of data=four_modalities: the files of ``kinds``, of all if none is named, are any row's."""
    task = "_".join((FOUR_MODALITIES, *kinds, "exchanged"))
    blind = tuple(PART_OF_KIND[kind] for kind in kinds or PART_OF_KIND)
    return Case((*OMNI, f"data.task={task}", *MORE_ROWS), data=FOUR_MODALITIES, blind=blind, all_seeds=False)


def _two_kinds(*kinds: str) -> Case:
    """Returns the question whether a tone goes with a picture, or its control: the files of a kind are any row's."""
    task = "_".join((TONE_OF_PICTURE, *kinds, "exchanged")) if kinds else TONE_OF_PICTURE
    words = (*OMNI, f"data.task={task}", f"model.task={TONE_OF_PICTURE}", *MORE_ROWS)
    if kinds:
        return Case(words, data=FOUR_MODALITIES, blind=(HELD_OUT,), blind_bound=0.6, all_seeds=False)
    return Case(words, data=FOUR_MODALITIES, goal=0.9, may_miss=1)


CASES = {
    "dense, async": Case(("model=tiny_qwen3_vl",)),
    "dense, colocate": Case(("model=tiny_qwen3_vl", "mode=colocate"), all_seeds=False),
    "experts, async": Case(MOE),
    "experts, colocate": Case((*MOE, "mode=colocate"), all_seeds=False),
    "dense, exchanged": Case(("model=tiny_qwen3_vl", *CONTROL), blind=(COLOUR, DIRECTION)),
    "experts, exchanged": Case((*MOE, *CONTROL), blind=(COLOUR, DIRECTION), all_seeds=False),
    "dense, kills": Case(
        ("model=tiny_qwen3_vl", "modality.workers=1", "run.save_every=20"), all_seeds=False, kills=True
    ),
    "dense, SGLang": Case(
        ("model=tiny_qwen3_vl", "engine=sglang", f"engine.python={SGLANG_PYTHON}"), all_seeds=False, needs=SGLANG_PYTHON
    ),
    "tower frozen": Case(("model=tiny_qwen3_vl", "model.freeze=[vision,projector]"), judged=False, all_seeds=False),
    "only the tower": Case(("model=tiny_qwen3_vl", "model.freeze=[language]"), judged=False, all_seeds=False),
    "hybrid, async": Case(("model=tiny_qwen3_5",)),
    "hybrid experts, async": Case(HYBRID_MOE),
    "hybrid experts, no replay": Case(("model=tiny_qwen3_5_moe",), all_seeds=False),
    "four kinds, async": Case(OMNI, data=FOUR_MODALITIES),
    "four kinds, colocate": Case((*OMNI, "mode=colocate"), data=FOUR_MODALITIES, all_seeds=False),
    "four kinds, TP2 EP2": Case((*OMNI, "parallel=tp2_ep2"), data=FOUR_MODALITIES, all_seeds=False),
    "four kinds, no picture": _exchanged("image"),
    "four kinds, no video": _exchanged("video"),
    "four kinds, no tone": _exchanged("audio"),
    "four kinds, words only": _exchanged(),
    "do they match?": _two_kinds(),
    "match, no picture": _two_kinds("image"),
    "match, no tone": _two_kinds("audio"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), help="which kinds of runs")
    parser.add_argument("--results", type=Path, default=None, help="file of finished runs, one JSON record a line")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    arguments = parser.parse_args()
    left_out = [name for name in arguments.only if (file := CASES[name].needs) is not None and not file.exists()]
    names = [name for name in arguments.only if name not in left_out]
    runs = [(name, seed) for name in names for seed in range(arguments.seeds if CASES[name].all_seeds else 1)]
    missed: dict[str, list[int]] = {name: [] for name in names}
    columns, finished = tuple[str, ...](), _finished(arguments.results)
    with tempfile.TemporaryDirectory(prefix="see-seeds-") as scratch:
        for name, seed in runs:
            case = CASES[name]
            words = (f"data={case.data}", *arguments.overrides, *case.words, f"seed={seed}")
            figures = finished.get(words)
            if figures is None:
                folder = Path(scratch) / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
                figures = _figures(run_with_kills(folder, words) if case.kills else run_demo(folder, words), case.parts)
                if arguments.results is not None:
                    with arguments.results.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"words": words, "figures": figures}) + "\n")
            if (shown := (HELD_OUT, *case.parts)) != columns:
                columns = shown
                print(f"{'run':26}{'seed':>5}" + "".join(f"{column:>18}" for column in columns) + f"{'wall s':>8}")
            print(_line(name, seed, figures, columns), flush=True)
            if not _as_expected(case, figures):
                missed[name].append(seed)
    for name in left_out:
        print(f"{name}: not run, because there is no {CASES[name].needs} (make sglang-cpu)")
    most = arguments.seeds - 1
    wrong = [f"{name}, seeds {found}" for name, found in missed.items() if len(found) > min(CASES[name].may_miss, most)]
    print(f"unexpected: {'; '.join(wrong)}" if wrong else "every run that may learn its task does, and no control does")
    return 1 if wrong else 0


def run_with_kills(folder: Path, words: tuple[str, ...]) -> dict[str, Any]:
    """Kills processes of a run, one after the other, and returns its summary.

    Raises AssertionError if a sample is lost or trained twice by the ledger's file, or if something is left behind.
    """
    with LiveRun(folder, *words) as live:
        for step, process in KILLS.items():
            live.wait_step(step)
            live.kill(process)
        finished = live.finish(deadline_s=DEADLINE_S)
    assert finished.code == 0, finished.output
    finished.assert_books_closed()
    return finished.summary


def _finished(results: Path | None) -> dict[tuple[str, ...], Figures]:
    if results is None or not results.is_file():
        return {}
    records = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {tuple(record["words"]): record["figures"] for record in records}


def _figures(summary: Mapping[str, Any], parts: Sequence[str]) -> Figures:
    """Returns the first and the last accuracy, those of the parts too, and the seconds of the run."""
    first, last = summary["eval"][0], summary["eval"][-1]
    by_part = {part: [each["figures"][f"{part}/exact"] for each in (first, last)] for part in parts}
    return {HELD_OUT: [first["exact"], last["exact"]], **by_part, "wall_s": [summary["wall_s"]]}


def _as_expected(case: Case, figures: Figures) -> bool:
    if not case.judged:
        return True
    first, last = figures[HELD_OUT]
    known = all(figures[part][-1] >= PART_GOAL for part in case.parts if part not in case.blind)
    if case.blind:
        return known and all(figures[column][-1] <= case.blind_bound for column in case.blind)
    started_low = first <= START_BOUND or "mode=colocate" not in case.words
    return known and started_low and last >= case.goal


def _line(name: str, seed: int, figures: Figures, columns: Sequence[str]) -> str:
    pairs = [figures[column] for column in columns]
    shown = "".join(f"{before:.3f} → {after:.3f}".rjust(18) for before, after in pairs)
    return f"{name:26}{seed:5}{shown}{figures['wall_s'][0]:8.0f}"


if __name__ == "__main__":
    sys.exit(main())
