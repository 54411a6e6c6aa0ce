"""Compares the text demo of two checkouts: samples per second, time to the first step, memory of each process.

    git worktree add /tmp/old COMMIT
    python -m benchmarks.two_checkouts --old /tmp/old [--rounds 5 --steps 120]

The two checkouts alternate in the same environment with the same seeds. Ratios are this checkout divided by the old
checkout. For each process name, the memory is the largest anonymous memory of one
process, in MB.
"""

from __future__ import annotations

import re
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

from benchmarks.harness import HERE, QUIET_RUN, Metrics, command_line, machine, run_relax, take_turns, write_report

ASYNC = ("mode=async", "mode.max_staleness=1")
LOOK_S = 0.2  # seconds between two observations of the processes
SKIPPED_STEPS = 10
NEW, OLD = "new", "old"


def run_demo(checkout: Path, number: int, *, steps: int) -> Metrics:
    """Runs the demo of a checkout to its end and returns its metrics."""
    memory: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="relax-checkouts-") as folder:
        ended, run_dir = threading.Event(), Path(folder) / "run"
        looks = threading.Thread(target=_look, args=(str(run_dir), memory, ended))
        looks.start()
        try:
            run = run_relax(
                run_dir, *ASYNC, *QUIET_RUN, f"run.steps={steps}", f"seed={max(0, number)}", checkout=checkout
            )
        finally:
            ended.set()
            looks.join()
    speed = {"samples/s": run.samples_per_s(skipped=SKIPPED_STEPS), "first step, s": run.summary["first_step_s"]}
    return speed | dict(sorted(memory.items()))


def _look(run: str, memory: dict[str, float], ended: threading.Event) -> None:
    """Records by process name the peak of anonymous memory of a run's processes, until the run ends."""
    children: set[int] = set()
    while not ended.wait(LOOK_S):
        parents: dict[int, int] = {}
        commands: dict[int, str] = {}
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    commands[int(process.name)] = command
                except OSError:  # the process has ended
                    continue
        children |= {pid for pid, command in commands.items() if f"run.dir={run}" in command}
        while more := {pid for pid, parent in parents.items() if parent in children} - children:
            children |= more
        for pid in children & commands.keys():
            try:
                found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
            except OSError:
                continue
            if found is not None:
                name = _name(commands[pid])
                memory[name] = max(memory.get(name, 0.0), int(found[1]) / 1e3)


def _name(command: str) -> str:
    """Returns the name of a process: Ray's class, the module, or else the program."""
    found = re.match(r"ray::[\w.]+", command) or re.search(r"-m \S+", command)
    return found[0] if found else command.split(" ", 1)[0].rpartition("/")[2]


def main() -> int:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--old", type=Path, required=True, help="folder of the other checkout")
    parser.add_argument("--steps", type=int, default=120, help="train steps of a run")
    given = parser.parse_args()
    print(machine(), flush=True)
    checkouts = {OLD: given.old.resolve(), NEW: HERE}
    ways = {name: partial(run_demo, folder, steps=given.steps) for name, folder in checkouts.items()}
    found = take_turns("two checkouts", ways, rounds=given.rounds, warm_up=False)
    print(f"new over old, {given.rounds} rounds")
    for figure in found.found[NEW][0]:
        if all(figure in figures for way in found.found.values() for figures in way):
            old, new = found.median(OLD, figure), found.median(NEW, figure)
            print(f"  {figure:<44} {old:10.1f} to {new:10.1f}  {found.ratio(NEW, figure, base=OLD):.3f}")
    write_report(given.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
