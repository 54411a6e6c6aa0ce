"""Inflicts random faults ("injuries") on real runs: ``python -m benchmarks.chaos --draws 1000 [--runs text agents]``.

Each run is a run of the demo with all roles (`benchmarks.chaos_runs`). ``--draws`` draws runs and injuries
(`benchmarks.chaos_injuries`) at random with ``--seed``. ``--each`` inflicts every injury of every run once. After an
injury the run must train new steps, and Relax must kill a stopped process. The benchmark measures the time from the end
of the injury to the first and to the third new train step. Steps that the run repeats from a checkpoint are not new. At
staleness 1 the rows of two steps may exist already, so the third step shows that all processes work again. After the
last injury the run trains to its end without faults. Then the benchmark checks the ledger with its own SQL: no sample
may be lost, trained twice or dropped without a reason. A finished run must leave no process, folder or shared memory.

As root the benchmark mounts a small disk for each run and small shared memory, and injuries fill them. Prints a line
for each injury with the machine's load, and tables. ``--record FILE`` appends the results to a file; the tables then
cover all results in the file, also from earlier invocations. ``--results FILE`` writes the results for the site. The
exit code is 1 if a run hung or ended, or a sample was lost.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.chaos_injuries import (
    FULL_DISK,
    FULL_SHARED_MEMORY,
    MEMORY_GROUPS,
    OUT_OF_MEMORY,
    SHARED_MEMORY,
    Failed,
    NotMet,
    Scene,
    injuries,
)
from benchmarks.chaos_runs import (
    HEARTBEAT_S,
    HUNG_S,
    LAST_STEPS,
    POLL_S,
    RUNS,
    WITHOUT_END,
    LedgerCounts,
    Training,
    count_samples,
    let_train,
)
from relax_core.contracts.process_trees import EXITED, process_state
from tests.integration.live_run import TIER

INJURIES_A_RUN = 10
DISK_MIB, SHARED_MEMORY_MIB = 512, 2048
NEW_NAMESPACE_OF_MOUNTS = 0x00020000  # CLONE_NEWNS of unshare(2)
NOTICE_S = HEARTBEAT_S + 60.0  # deadline of Relax to kill a stopped process, also on a busy machine
PERSISTED_S = 0.5  # maximum delay until an event is in the ledger's file
THIRD = 3  # new step; rows for max_staleness + 1 = 2 steps may exist at the moment of the injury
SURVIVED, HUNG, ENDED, UNNOTICED, NOT_MET = ENDS = ("survived", "hung", "ended", "unnoticed", "not met")


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Holds one injury of a run and its result.

    ``tier`` is the highest recovery tier that the run reported, or 0. ``first_s`` and ``third_s`` are the seconds from
    the injury's end to the first and the third new train step. ``noticed_s`` are the seconds from SIGSTOP to the end of
    the last stopped process, None without SIGSTOP.
    """

    injury: str
    run: str
    text: str
    at_step: int
    end: str
    tier: int = 0
    first_s: float | None = None
    third_s: float | None = None
    noticed_s: float | None = None

    def __str__(self) -> str:
        times = (
            f", new steps after {self.first_s:.1f} and {self.third_s:.1f} s" if self.first_s and self.third_s else ""
        )
        noticed = "" if self.noticed_s is None else f", killed after {self.noticed_s:.1f} s"
        return f"{self.run}: {self.text} at step {self.at_step}: {self.end}, tier {self.tier}{noticed}{times}"


# -- One run ----------------------------------------------------------------------------------------------------------
def injure(scene: Scene, injury: str, run: str) -> Draw:
    """Lets the run train, inflicts one injury and waits until training continues."""

    def draw(end: str, text: str, **values: Any) -> Draw:
        return Draw(injury=injury, run=run, text=text, at_step=at_step, end=end, **values)

    at_step = scene.training.newest()
    if (state := let_train(scene.live, scene.training, scene.chance)) != SURVIVED:
        return draw(state, f"before {injury}")
    scene.text, scene.stopped, at_step = [], {}, scene.training.newest()
    live, printed = scene.live, len(scene.live.output())
    try:
        injuries(scene.run)[injury](scene)
    except Failed as error:
        return draw(ENDED, f"{', '.join(scene.text)}: {error}")
    except (NotMet, TimeoutError) as error:
        return draw(NOT_MET, f"{injury}: {error}")
    values = _await_steps(scene)
    output = scene.live.output()[printed if scene.live is live else 0 :]
    tier = max((int(found) for found in TIER.findall(output)), default=0)
    return draw(values.pop("end"), ", ".join(scene.text), tier=tier, **values)


def _await_steps(scene: Scene) -> dict[str, Any]:
    """Waits for the third new step and the end of all stopped processes. Returns values for `Draw`."""
    began = time.monotonic()
    time.sleep(PERSISTED_S)
    behind, event = scene.training.newest(), scene.training.last_event()
    first_s = third_s = noticed_s = None
    while True:
        steps, now_s = scene.training.new_steps(behind=behind, event=event), time.monotonic() - began
        first_s = now_s if first_s is None and steps else first_s
        third_s = now_s if third_s is None and steps >= THIRD else third_s
        for pid, since in list(scene.stopped.items()):
            if process_state(pid).startswith(EXITED):
                noticed_s = max(noticed_s or 0.0, time.monotonic() - since)
                del scene.stopped[pid]
        late = any(time.monotonic() - since > NOTICE_S for since in scene.stopped.values())
        if (third_s is not None and not scene.stopped) or late or now_s > HUNG_S or not scene.live.running():
            break
        time.sleep(POLL_S)
    if third_s is not None:
        end = UNNOTICED if scene.stopped else SURVIVED
    elif not scene.live.running():
        end = ENDED
    else:
        end = UNNOTICED if late else HUNG
    return {"end": end, "first_s": first_s, "third_s": third_s, "noticed_s": noticed_s}


def injured_run(folder: Path, name: str, chosen: Sequence[str], *, seed: int) -> Iterator[Draw | LedgerCounts]:
    """Starts a run, inflicts these injuries and lets the run end. Yields each injury, then the ledger's counts."""
    run, training = RUNS[name], Training(folder)
    scene = Scene(
        folder=folder,
        run=run,
        chance=random.Random(seed),
        training=training,
        live=run.start(folder, WITHOUT_END),
    )
    try:
        for injury in chosen:
            draw = injure(scene, injury, name)
            yield draw
            if draw.end in (HUNG, ENDED, UNNOTICED):
                print(scene.live.output()[-6000:], flush=True)
                scene.live.kill_everything()
                scene.again()
        scene.live.terminate()
        scene.live.finish(deadline_s=HUNG_S)
    finally:
        scene.live.__exit__()
    steps = training.newest() + 1 + LAST_STEPS
    with run.start(folder, f"run.steps={steps}", "resume=auto") as live:
        finished = live.finish(deadline_s=HUNG_S)
    if finished.code:
        print(finished.output[-6000:], flush=True)
        yield Draw(injury="quiet end", run=name, text=f"exit code {finished.code}", at_step=steps, end=ENDED)
    if not finished.code or training.last_event():  # a run that never started has no ledger
        yield count_samples(folder)


# -- Draws ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Machine:
    """Returns whether this machine allows private mounts (small disks, small shared memory) and memory control
    groups."""

    mounts: bool
    memory_groups: bool

    @staticmethod
    def prepare() -> Machine:
        """Creates private mounts with small shared memory for this process and its children, if the user may do so."""
        mounts = os.geteuid() == 0 and ctypes.CDLL(None).unshare(NEW_NAMESPACE_OF_MOUNTS) == 0
        if mounts:
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            mount(SHARED_MEMORY, SHARED_MEMORY_MIB)
        return Machine(mounts=mounts, memory_groups=os.access(MEMORY_GROUPS, os.W_OK))

    def without(self) -> set[str]:
        """Returns the injuries that this machine does not allow."""
        no_mounts = () if self.mounts else (FULL_DISK, FULL_SHARED_MEMORY)
        return {*no_mounts, *(() if self.memory_groups else (OUT_OF_MEMORY,))}


def mount(folder: Path, mib: int) -> None:
    """Mounts a small file system in memory on a folder."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=1777", "tmpfs", str(folder)], check=True)


@contextmanager
def own_disk(folder: Path, machine: Machine) -> Iterator[Path]:
    """Creates a folder. As root, mounts a small file system on the folder while the block runs."""
    folder.mkdir()
    if not machine.mounts:
        yield folder
        return
    mount(folder, DISK_MIB)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def possible_runs() -> list[str]:
    """Returns the names of the runs that this machine allows: another user needs root, a false clock a C compiler."""
    return [
        name
        for name, run in RUNS.items()
        if (run.user is None or (os.geteuid() == 0 and shutil.which("setpriv") is not None))
        and (not run.false_clock or shutil.which("cc") is not None)
    ]


def draw_runs(
    possible: dict[str, list[str]], *, draws: int, each: bool, chance: random.Random
) -> Iterator[tuple[str, list[str]]]:
    """Yields runs with at most `INJURIES_A_RUN` injuries each: ``draws`` random injuries, or with ``each`` all once."""
    if each:
        for name, kinds in possible.items():
            shuffled = chance.sample(kinds, len(kinds))
            for start in range(0, len(kinds), INJURIES_A_RUN):
                yield name, shuffled[start : start + INJURIES_A_RUN]
        return
    while draws > 0:
        name = chance.choice(list(possible))
        yield name, [chance.choice(possible[name]) for _ in range(min(draws, INJURIES_A_RUN))]
        draws -= INJURIES_A_RUN


# -- Results ----------------------------------------------------------------------------------------------------------
COLUMNS = ("injuries", *ENDS, "next step, s: median", "99%", "third step, s: median", "99%", "stopped, killed after, s")


def rows(draws: Sequence[Draw], attribute: str) -> list[tuple[str | int | float | None, ...]]:
    """Returns a row with `COLUMNS` for each value of an attribute of the draws, and a row for all draws."""
    found = []
    for value in (*sorted({getattr(draw, attribute) for draw in draws}), None):
        own = [draw for draw in draws if value is None or getattr(draw, attribute) == value]
        counts = [sum(draw.end == end for draw in own) for end in ENDS]
        first, third = ([getattr(draw, name) for draw in own] for name in ("first_s", "third_s"))
        noticed = [draw.noticed_s for draw in own if draw.noticed_s is not None]
        longest = f"{max(noticed):.1f}" if noticed else None
        found.append(("all" if value is None else value, len(own), *counts, *_times(first), *_times(third), longest))
    return found


def _times(seconds: Sequence[float | None]) -> tuple[str | None, str | None]:
    known = sorted(second for second in seconds if second is not None)
    if not known:
        return None, None
    return f"{median(known):.1f}", f"{known[min(len(known) - 1, int(0.99 * len(known)))]:.1f}"


def ledger_text(ledgers: Sequence[LedgerCounts]) -> str:
    """Returns a text with the sums of the ledgers' counts."""
    issued, lost, twice, without_reason = (
        sum(getattr(counts, name) for counts in ledgers)
        for name in ("issued", "lost", "trained_twice", "without_reason")
    )
    return (
        f"{issued:,} samples in {len(ledgers)} ledgers: {lost} lost, {twice} trained twice, {without_reason} dropped "
        "without a reason"
    )


def tables(found: Sequence[Draw | LedgerCounts]) -> str:
    """Returns Markdown tables by injury, by run and by recovery tier, and the sums of the ledgers' counts."""
    draws = [draw for draw in found if isinstance(draw, Draw)]
    lines = []
    for attribute in ("injury", "run", "tier"):
        lines += [f"| {attribute} | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
        lines += [
            f"| {' | '.join('' if cell is None else str(cell) for cell in row)} |" for row in rows(draws, attribute)
        ]
        lines.append("")
    return "\n".join([*lines, ledger_text([counts for counts in found if isinstance(counts, LedgerCounts)])])


def results(found: Sequence[Draw | LedgerCounts], *, command: str) -> dict[str, Any]:
    """Returns the content of the results file in benchmarks/results/."""
    draws = [draw for draw in found if isinstance(draw, Draw)]
    ledgers = ledger_text([counts for counts in found if isinstance(counts, LedgerCounts)])
    survived = sum(draw.end == SURVIVED for draw in draws)
    by_injury, by_run, by_tier = (rows(draws, attribute) for attribute in ("injury", "run", "tier"))
    return {
        "title": "Random injuries",
        "command": command,
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores",
        "summary": f"{survived} of {len(draws)} injuries were survived. {ledgers}.",
        "columns": ["injury", *COLUMNS],
        "rows": by_injury,
        "notes": [
            f"run.heartbeat_timeout_s={HEARTBEAT_S}. Not met: the run had no such moment or process within a minute.",
            "No run left a process, a temporary folder or shared memory.",
        ],
        "tables": [
            {"title": "By run", "columns": ["run", *COLUMNS], "rows": by_run},
            {
                "title": "By the tier of recovery that the run reported (0: none was needed)",
                "columns": ["tier", *COLUMNS],
                "rows": by_tier,
            },
        ],
    }


def went_wrong(found: Sequence[Draw | LedgerCounts]) -> bool:
    """Returns whether a run hung or ended, Relax did not notice a stopped process, or a ledger is wrong."""
    return any(
        outcome.end in (HUNG, ENDED, UNNOTICED) if isinstance(outcome, Draw) else not outcome.closed
        for outcome in found
    )


def read_record(file: Path) -> list[Draw | LedgerCounts]:
    """Reads a file that ``--record`` wrote."""
    values = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        Draw(**value) if "injury" in value else LedgerCounts(**value | {"wrong": tuple(value["wrong"])})
        for value in values
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--each", action="store_true", help="every injury of every run once, in random order")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", nargs="+", choices=tuple(RUNS), default=possible_runs())
    parser.add_argument("--kinds", nargs="+", help="names of injuries; default: all")
    parser.add_argument("--record", type=Path, help="file for the results, one JSON object in a line")
    parser.add_argument("--results", type=Path, help="file of benchmarks/results/ to write from the record")
    arguments = parser.parse_args()
    machine, chance = Machine.prepare(), random.Random(arguments.seed)
    possible = {name: list(injuries(RUNS[name], without=machine.without())) for name in arguments.runs}
    if unknown := sorted({*(arguments.kinds or ())} - {kind for kinds in possible.values() for kind in kinds}):
        known = sorted({kind for kinds in possible.values() for kind in kinds})
        parser.error(f"there is no {', '.join(unknown)} here; there are {', '.join(known)}")
    possible = {
        name: own
        for name, kinds in possible.items()
        if (own := [kind for kind in kinds if kind in (arguments.kinds or kinds)])
    }
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; not here: {sorted(machine.without())}", flush=True)
    found: list[Draw | LedgerCounts] = []
    with tempfile.TemporaryDirectory(prefix="relax-chaos-") as folder:
        Path(folder).chmod(0o755)
        chosen = draw_runs(possible, draws=arguments.draws, each=arguments.each, chance=chance)
        for number, (name, kinds) in enumerate(chosen):
            with own_disk(Path(folder) / f"disk{number}", machine) as disk:
                for outcome in injured_run(disk / "run", name, kinds, seed=chance.randrange(1 << 30)):
                    found.append(outcome)
                    print(f"{len(found):>4}. {outcome} (load {os.getloadavg()[0]:.0f})", flush=True)
                    if arguments.record is not None:
                        with arguments.record.open("a") as file:
                            file.write(json.dumps(asdict(outcome)) + "\n")
    everything = found if arguments.record is None else read_record(arguments.record)
    print(tables(everything))
    if arguments.results is not None:
        command = f"python -m benchmarks.chaos --draws {len(everything)}"
        arguments.results.write_text(json.dumps(results(everything, command=command), indent=2) + "\n")
    return int(went_wrong(found))


if __name__ == "__main__":
    sys.exit(main())
