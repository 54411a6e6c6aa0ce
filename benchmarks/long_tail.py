"""Answers with a long tail of lengths: what staleness, over-sampling and partial rollouts gain, and their limit.

    python -m benchmarks.long_tail [--steps 40 --prompts 8 --group-size 6] [--only "async s=2" …] [--json FILE]
    python -m benchmarks.long_tail --turns 3 --tool-wait 0.5 […]        # episodes of several turns with slow tools

Whole runs of ``python -m relax_core``, one after the other, on a task whose answers have the length that their prompt
asks for (benchmarks/countdown_task.py): lognormal, sigma = 1, a mean of 64 tokens, at most 1,024. All runs have the
same prompts in the same order, a Qwen3 of 6.0 million parameters, one thread for the trainer and one for the engine,
and the two are bound to a core each. The other processes of a run have no core of their own.

With ``--turns`` each episode has as many turns, each with an answer of such a length; the longest that the model's
positions allow is 680 tokens for three turns. Between two turns a tool takes a time that is lognormal, too: sigma = 1,
a mean of ``--tool-wait`` seconds, at most eight times as long (benchmarks/countdown_env.py).

``samples/s`` and ``tokens/s`` count what is trained from the end of train step ``--skip`` to the end of the last but
one. ``reward`` is the mean of the last five steps; it begins at 0.6, and at 0.5 in later turns. ``limit``: the samples
a second of a simulation of the same answers with the run's own times of decode and train steps and without any overhead
(benchmarks/long_tail_limit.py). ``at tools`` and ``at the engine`` are mean numbers of samples, which may wait at the
engine for newer weights; ``turn late`` is the time from a response to the next turn's request, beyond the
tool's. ``prefilled`` counts tokens for each trained sample. Figures are medians over the repeats, and a ratio is the
median of the repeats' own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec

from benchmarks.countdown_env import CountdownEnvConfig, check
from benchmarks.countdown_task import check_wish, drawn_lengths, model_folder, most_turn_tokens, write_rows
from benchmarks.long_tail_limit import Simulation
from benchmarks.long_tail_read import Figures, Finished, read_run
from benchmarks.long_tail_run import Work, execute
from relax_core.bus.state.settings import BusSettings

DEADLINE_S = 3600.0
MAX_ABORTS = 3
SPARE = 1.5  # rollout.over_sampling


@dataclass(frozen=True, kw_only=True)
class Way:
    """Holds the settings of a run that differ between the ways."""

    words: tuple[str, ...]
    staleness: int = 0
    over_sampling: float = 1.0
    surplus: Literal["drop", "keep"] = "drop"
    max_aborts: int = 0
    whole_steps: bool = False


def _async(staleness: int, *words: str) -> tuple[str, ...]:
    return ("mode=async", f"mode.max_staleness={staleness}", *words)


COLOCATE = "colocate"
WAYS: Mapping[str, Way] = {
    COLOCATE: Way(words=("mode=colocate",), whole_steps=True),
    **{f"async s={number}": Way(words=_async(number), staleness=number) for number in (0, 1, 2, 4)},
    **{
        f"s=2, x{SPARE} {surplus}": Way(
            words=_async(2, f"rollout.over_sampling={SPARE}", f"rollout.surplus={surplus}"),
            staleness=2,
            over_sampling=SPARE,
            surplus=surplus,
        )
        for surplus in ("drop", "keep")
    },
    "s=2, abort": Way(
        words=_async(2, "rollout.partial=abort", f"rollout.max_aborts={MAX_ABORTS}"), staleness=2, max_aborts=MAX_ABORTS
    ),
}
OF_LIMIT, OF_COLOCATE = "of the limit", f"of {COLOCATE}"
REACHED = {  # the figures that the runs are to reach: (way, figure) → the least value
    **{(f"async s={number}", OF_LIMIT): 0.95 for number in (1, 2, 4)},
    ("async s=2", OF_COLOCATE): 2.0,
}
FORMS = {  # rows of the table: figure → its form
    "samples/s": ".1f",
    "tokens/s": ",.0f",
    OF_COLOCATE: ".2f",
    "limit": ".1f",
    OF_LIMIT: ".3f",
    "reward": ".3f",
    "training": ".0%",
    "waiting": ".0%",
    "waiting in the limit": ".0%",
    "engine busy": ".0%",
    "trainer without a core": ".1%",
    "engine without a core": ".1%",
    "staleness": ".2f",
    "staleness in the limit": ".2f",
    "most staleness": ".0f",
    "stale": ".0f",
    "surplus": ".0f",
    "at tools": ".1f",
    "at tools in the limit": ".1f",
    "at the engine": ".1f",
    "decoded together": ".1f",
    "decoded together in the limit": ".1f",
    "prefilled": ".1f",
    "prefilled in the limit": ".1f",
    "turn late, ms": ".1f",
    "length": ".1f",
    "counted": ".3f",
}


def bus_settings(way: Way, work: Work) -> BusSettings:
    """Returns the settings of the bus of a run, as far as the simulation needs them."""
    return BusSettings(
        groups_per_step=work.prompts,
        group_size=work.group_size,
        max_staleness=way.staleness,
        on_stale="drop",
        total_steps=work.steps,
        inline_bytes=0,
        max_row_bytes=1,
        spare_groups=math.ceil(round((way.over_sampling - 1.0) * work.prompts, 6)),
        surplus=way.surplus,
    )


def drawn_wishes(work: Work, count: int, *, mean: float, longest: int, seed: int) -> list[list[int]]:
    """Returns the tokens of the turns that each of ``count`` prompts asks for.

    Raises ValueError (key, value, fix) for turns that the run or the model has no room for.
    """
    if work.cap > (most := most_turn_tokens(work.turns)):
        raise ValueError(
            f"--cap {work.cap}: the model has no positions for {work.turns} such turns. Give {most} or less."
        )
    check(CountdownEnvConfig(tool_wait_s=work.tool_wait_s, step_timeout_s=work.step_timeout_s))
    lengths = drawn_lengths(count * work.turns, mean=mean, cap=longest, seed=seed)
    check_wish(max(lengths), work.cap, key="--cap")
    return [lengths[first : first + work.turns] for first in range(0, len(lengths), work.turns)]


def run_way(name: str, work: Work, wishes: Sequence[Sequence[int]], *, seed: int, keep: Path | None) -> Figures:
    """Makes the run of a way and the simulation of its answers; returns the figures of both."""
    way = WAYS[name]
    with tempfile.TemporaryDirectory(prefix="relax-tail-") as temporary:
        rows, folder = Path(temporary) / "rows.jsonl", Path(temporary) / "run"
        write_rows(rows, wishes, seed=seed)
        loads = execute([*work.words(rows, seed=seed), *way.words], folder, deadline_s=DEADLINE_S)
        done = read_run(
            folder,
            loads,
            work,
            wishes=wishes,
            seed=seed,
            bus=bus_settings(way, work),
            whole_steps=way.whole_steps,
            max_aborts=way.max_aborts,
        )
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        file = keep / f"{name.replace(' ', '-').replace(',', '')}-{seed}.json"
        file.write_bytes(msgspec.json.encode(done.trace))
    books = summary["ledger"]
    if books["lost"] or books["trained_twice"]:
        raise SystemExit(f"{name}: the ledger has lost samples or trained some twice: {books}")
    return all_figures(done, books["dropped"])


def all_figures(done: Finished, dropped: Mapping[str, int]) -> Figures:
    """Returns a run's figures with those of its simulation; ``dropped`` counts its samples by reason."""
    trace, figures = done.trace, done.figures
    found = Simulation(trace).run()
    steps = slice(trace.skipped_steps, -1)
    took_s = found.ended_s[-2] - found.ended_s[trace.skipped_steps - 1]
    samples = sum(found.staleness.values())
    limit = found.samples_per_s(trace.skipped_steps)
    first, last = found.counts[trace.skipped_steps - 1], found.counts[-2]
    at_tools = {"at tools in the limit": (last.tools_s - first.tools_s) / took_s} if trace.turns else {}
    return figures | {
        "limit": limit,
        OF_LIMIT: figures["samples/s"] / limit,
        "waiting in the limit": sum(found.waited_s[steps]) / took_s,
        "staleness in the limit": sum(age * count for age, count in found.staleness.items()) / samples,
        "stale": float(dropped.get("stale", 0)),
        "surplus": float(dropped.get("over_sampled", 0)),
        "decoded together in the limit": (last.decoded - first.decoded) / (last.steps - first.steps),
        "prefilled in the limit": (last.prefilled - first.prefilled) / sum(found.samples[steps]),
        **at_tools,
    }


def with_ratios(found: Mapping[str, Sequence[Figures]]) -> dict[str, Figures]:
    """Returns the medians of each way's figures, with its samples a second in relation to those of mode=colocate."""
    medians = {name: {key: median(one[key] for one in runs) for key in runs[0]} for name, runs in found.items()}
    if COLOCATE in found:
        for name, runs in found.items():
            pairs = zip(runs, found[COLOCATE], strict=True)
            medians[name][OF_COLOCATE] = median(one["samples/s"] / base["samples/s"] for one, base in pairs)
    return medians


def table(medians: Mapping[str, Figures]) -> str:
    """Returns a table in Markdown: a column for each way, a row for each figure."""
    lines = [f"| | {' | '.join(medians)} |", f"|---{'|---' * len(medians)}|"]
    for key, form in FORMS.items():
        if any(key in one for one in medians.values()):
            cells = [f"{one[key]:{form}}" if key in one else "" for one in medians.values()]
            lines.append(f"| {key} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdicts(medians: Mapping[str, Figures]) -> list[str]:
    """Returns a line for each figure that the runs are to reach."""
    return [
        f"{name} {key}: {medians[name][key]:.3f}, at least {least} is wanted: "
        + ("reached" if medians[name][key] >= least else "not reached")
        for (name, key), least in REACHED.items()
        if key in medians.get(name, {})
    ]


def main() -> None:
    given = _parse()
    cap = most_turn_tokens(given.turns) if given.cap is None else given.cap
    work = Work(
        steps=given.steps,
        prompts=given.prompts,
        group_size=given.group_size,
        cap=cap,
        lr=given.lr,
        running=given.running,
        skipped=given.skip,
        micro_batch_tokens=given.micro_batch,
        turns=given.turns,
        tool_wait_s=given.tool_wait,
    )
    names = given.only or list(WAYS)
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}; the model is in {model_folder()}")
    found: dict[str, list[Figures]] = {name: [] for name in names}
    for seed in range(given.seed, given.seed + given.repeats):
        # Over-sampling admits more than is trained, and the next steps' prompts are admitted before the end.
        count = math.ceil(given.prompts * (SPARE * (given.steps + 6) + 1))
        try:
            wishes = drawn_wishes(work, count, mean=given.mean, longest=given.longest or cap, seed=seed)
            for name in names:
                found[name].append(run_way(name, work, wishes, seed=seed, keep=given.keep))
                one = found[name][-1]
                print(f"{name}: {one['samples/s']:.1f} samples/s, {one[OF_LIMIT]:.3f} {OF_LIMIT}", flush=True)
        except ValueError as error:
            raise SystemExit(f"long_tail: {error}") from error
    medians = with_ratios(found)
    print("\n".join(["", table(medians), "", *verdicts(medians)]))
    if given.json is not None:
        report = {"work": msgspec.to_builtins(work), "mean": given.mean, "medians": medians, "repeats": found}
        given.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="train steps of a run")
    parser.add_argument("--skip", type=int, default=8, help="train steps at the start that no rate counts")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a train step")
    parser.add_argument("--group-size", type=int, default=6, help="answers to a prompt")
    parser.add_argument("--mean", type=float, default=64.0, help="mean tokens of an answer before the cut")
    parser.add_argument("--turns", type=int, default=1, help="turns of an episode")
    parser.add_argument("--tool-wait", type=float, default=0.5, help="mean seconds of a tool between two turns")
    parser.add_argument("--cap", type=int, help="tokens of a turn at most; default: what the model's positions allow")
    parser.add_argument("--longest", type=int, help="the longest answer that a prompt asks for; default: --cap")
    parser.add_argument("--running", type=int, default=512, help="samples decoded at one time at most")
    parser.add_argument("--micro-batch", type=int, default=1024, help="parallel.micro_batch_tokens")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each way, with other prompts each time")
    parser.add_argument("--seed", type=int, default=0, help="of the first repeat")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), help="these ways alone")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--keep", type=Path, help="folder for the traces of the runs, for benchmarks.long_tail_limit")
    given = parser.parse_args()
    if given.turns < 1:
        parser.error(f"--turns {given.turns}: give 1 or more")
    if not 1 <= given.skip <= given.steps - 4 or min(given.repeats, given.prompts) < 1 or given.group_size < 2:
        parser.error("--skip: 1 to --steps less 4; --repeats and --prompts: 1 or more; --group-size: 2 or more")
    return given


if __name__ == "__main__":
    main()
