"""Adds and removes engines of a real run of the demo: ``python -m benchmarks.elastic --adds 20 --stop 30 --cycles 50``.

``--adds N`` adds one engine and removes it again, N times, in one run under load: the first engine processes 16 samples
at once and is slower than the trainer. Prints the seconds from POST to each state and to the engine's first group on
the bus, and the time to leave. Also prints the duration of train steps while engines join, compared with steps without
any change.

``--cycles N`` adds one to three engines and removes them, N times. While an engine joins or leaves, the benchmark
cancels an order or kills a process with SIGKILL, alternately. Prints the result of each cycle, the samples that were
lost or trained twice, and the memory of controller, rollout and trainer before and after.

``--leaves N`` removes an engine under load N times. Three cases alternate: the engine finishes its samples, its samples
are moved at once, and the order is cancelled while the engine drains. Prints how the orders ended and how long they
took.

``--stop SECONDS`` stops a new engine by SIGSTOP for this time, once in each state. Prints the longest train steps
during the stop, compared with steps without any change.

``--pairs N`` runs the demo N times with an idle gateway and N times without a gateway, alternately.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from relax_core.control.controller_process import CONTROLLER
from relax_core.observe.event_log import ACTOR, each_metric
from tests.integration.elastic_run import JOINING, OVERRIDES, OWNER, TRAINER, ElasticRun
from tests.integration.live_run import ENGINE, ROLLOUT, FinishedRun, LiveRun, run_to_end

WARM_STEPS = 30
QUIET_STEPS = 200  # train steps for comparison, without any change of the engines
MOST = 4  # maximum number of engines, including the first engine
ADD_RUN = (*OVERRIDES, "run.save_every=0")
PAIR_RUN = ("run.steps=300", "eval.every=0", "run.save_every=0", "run.export_hf=false")
CYCLE_RUN = (
    *OVERRIDES,
    "run.save_every=10",
    "run.max_restarts=1000",
    "run.max_recoveries=1000",
)
KILLED = ("newcomer", "owner", "gateway", "rollout", "trainer", "controller")
CANCEL = "cancel"
HARMS = [
    *itertools.product((CANCEL, *KILLED), ("CREATING", "HEALTH_CHECKING", "WEIGHT_SYNCING")),
    *itertools.product((CANCEL, *KILLED), ("DRAINING",)),
]


def words(seconds: Sequence[float]) -> str:
    """Formats the median and the maximum of durations in seconds."""
    return f"median {median(seconds):.2f} s, worst {max(seconds):.2f} s ({len(seconds)} times)"


def books(run: FinishedRun) -> str:
    """Formats the counts of a run's ledger."""
    found = run.summary["ledger"]
    return f"{found['issued']} samples, {found['lost']} lost, {found['trained_twice']} trained twice"


def said(steps: Sequence[float]) -> str:
    """Formats the durations of train steps in milliseconds."""
    if not steps:
        return "no train step"
    ordered = sorted(steps)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"{len(ordered)} train steps: median {median(ordered):.0f} ms, p99 {p99:.0f}, longest {ordered[-1]:.0f}"


# -- adding under load ------------------------------------------------------------------------------------------------
def step_ms(folder: Path) -> list[tuple[float, float]]:
    """Returns for each train step the Unix time of its record, and its duration in milliseconds."""
    return [(record.time_s, record.values["step_ms"]) for record in each_metric(folder) if record.source == ACTOR]


def adds(folder: Path, *, times: int, overrides: Sequence[str]) -> bool:
    """Measures ``times`` engines that join and leave. Returns whether no sample was lost."""
    came: dict[str, list[float]] = {}
    left: list[float] = []
    spans: list[tuple[float, float]] = []
    with LiveRun(folder, *ADD_RUN, *overrides) as live:
        live.wait_step(WARM_STEPS)
        quiet_from = time.time()
        live.wait_step(WARM_STEPS + QUIET_STEPS)
        quiet = (quiet_from, time.time())
        elastic = ElasticRun(live)
        for _ in range(times):
            began = time.time()
            order = elastic.order("scale_out", {"num_replicas": 2})
            assert order["status"] == "ACTIVE", order
            for change in order["history"]:
                came.setdefault(change["state"], []).append(change["at"] - began)
            group = elastic.first_group(order["engine_ids"][0])
            came.setdefault("first group on the bus", []).append(group - began)
            spans.append((began, order["history"][-1]["at"]))
            began = time.time()
            order = elastic.order("scale_in", {"num_replicas": 1})
            assert order["status"] == "COMPLETED", order
            left.append(order["history"][-1]["at"] - began)
            elastic.wait_alone()
        elastic.ask("POST", "/run/stop")
        run = live.finish()
    for state, seconds in came.items():
        print(f"POST to {state}: {words(seconds)}")
    print(f"POST to COMPLETED of the scale-in: {words(left)}")
    steps = step_ms(folder)
    for name, times_of in (("without any change", [quiet]), ("while an engine joins", spans)):
        print(said([ms for at, ms in steps if any(begin <= at <= end for begin, end in times_of)]), name)
    print(books(run), flush=True)
    return run.summary["ledger"]["lost"] == run.summary["ledger"]["trained_twice"] == 0


# -- leaving under load -----------------------------------------------------------------------------------------------
def leaves(folder: Path, *, times: int, overrides: Sequence[str]) -> bool:
    """Removes engines ``times`` times. Returns whether no sample was lost. Raises AssertionError if an order fails."""
    took: dict[str, list[float]] = {}
    ends: Counter[str] = Counter()
    with LiveRun(folder, *ADD_RUN, *overrides) as live:
        live.wait_step(WARM_STEPS)
        elastic = ElasticRun(live)
        for number in range(times):
            present = elastic.engines()
            if len(present) < 2:
                assert elastic.order("scale_out", {"num_replicas": MOST})["status"] == "ACTIVE"
                present = elastic.engines()
                elastic.first_group(present[-1])
            way = ("finishes", "is moved", "is cancelled")[number % 3]
            body: dict[str, Any] = {"engine_ids": [present[-1]], "force": way == "is moved"}
            began = time.time()
            if way == "is cancelled":
                order = cancelled(elastic, "scale_in", body, state="DRAINING")
            else:
                order = elastic.order("scale_in", body)
            took.setdefault(way, []).append(order["history"][-1]["at"] - began)
            ends[f"{way}: {order['status']}"] += 1
            assert order["status"] == "COMPLETED" or way == "is cancelled", order
        while len(elastic.engines()) > 1:
            elastic.order("scale_in", {"num_replicas": 1})
        elastic.wait_alone()
        elastic.ask("POST", "/run/stop")
        run = live.finish()
    for way, seconds in took.items():
        print(f"an engine that leaves {way}: {words(seconds)}")
    print(", ".join(f"{end} {number} times" for end, number in ends.items()))
    print(books(run), flush=True)
    return run.summary["ledger"]["lost"] == run.summary["ledger"]["trained_twice"] == 0


# -- stopped engines ---------------------------------------------------------------------------------------------------
def stops(folder: Path, *, seconds: float, overrides: Sequence[str]) -> bool:
    """Stops one new engine in each state for some seconds. Returns whether no sample was lost."""
    spans: dict[str, tuple[float, float]] = {}
    ends: dict[str, str] = {}
    with LiveRun(folder, *ADD_RUN, "run.heartbeat_timeout_s=600", *overrides) as live:
        live.wait_step(WARM_STEPS)
        began = time.time()
        live.wait_step(WARM_STEPS + QUIET_STEPS)
        spans["without any change"] = began, time.time()
        elastic = ElasticRun(live)
        for state in ("CREATING", "HEALTH_CHECKING", "WEIGHT_SYNCING", "ACTIVE", "DRAINING"):
            older = elastic.of_engines()
            order = elastic.ask("POST", "/rollout/scale_out", {"num_replicas": 2})
            elastic.follow("scale_out", order, "ACTIVE" if state == "DRAINING" else state)
            pids = elastic.newcomers(OWNER if state == "CREATING" else ENGINE, older=older)
            if state == "DRAINING":
                elastic.first_group(elastic.follow("scale_out", order)["engine_ids"][0])
                order = elastic.ask("POST", "/rollout/scale_in", {"num_replicas": 1})
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            began = time.time()
            time.sleep(seconds)
            spans[f"stopped in {state}"] = began, time.time()
            for pid in pids:
                with suppress(ProcessLookupError):  # the engine was removed meanwhile
                    os.kill(pid, signal.SIGCONT)
            way = "scale_in" if state == "DRAINING" else "scale_out"
            ends[f"stopped in {state}"] = elastic.follow(way, order)["status"]
            elastic.order("scale_in", {"num_replicas": 1})
            elastic.wait_alone()
        elastic.ask("POST", "/run/stop")
        run = live.finish()
    steps = step_ms(folder)
    for name, (begin, end) in spans.items():
        print(f"{said([ms for at, ms in steps if begin <= at <= end])} {name}; {ends.get(name, '')}".rstrip("; "))
    print(books(run), flush=True)
    return run.summary["ledger"]["lost"] == run.summary["ledger"]["trained_twice"] == 0


# -- cycles with kills ------------------------------------------------------------------------------------------------
def memory(live: LiveRun) -> dict[str, float]:
    """Returns the resident memory of three processes in MB."""
    found = {}
    for pid, line in live.processes().items():
        try:
            process = psutil.Process(pid)
            name = CONTROLLER if process.name() == CONTROLLER else line
            for kind in (CONTROLLER, ROLLOUT, TRAINER):
                if kind in name:
                    found[kind.removeprefix("ray::")] = process.memory_info().rss / 1e6
        except psutil.NoSuchProcess:
            continue
    return found


def cycle(elastic: ElasticRun, harm: tuple[str, str], *, engines: int) -> str:
    """Adds engines and removes them, and cancels or kills something meanwhile. Returns how both orders ended."""
    victim, state = harm
    ends = []
    for way, target in (("scale_out", 1 + engines), ("scale_in", 1)):
        body = {"num_replicas": target}
        if (state in JOINING) != (way == "scale_out"):
            order = elastic.order(way, body)
        elif victim == CANCEL:
            order = cancelled(elastic, way, body, state=state)
        else:
            order = elastic.order(way, body, victim=victim, state=state)
        ends.append(f"{way} {order['status']}" + (f" ({order['failure']})" if order["failure"] else ""))
    if elastic.engines() != ["engine-0"]:  # the scale-in was cancelled
        elastic.order("scale_in", {"num_replicas": 1, "force": True})
    elastic.wait_alone()
    return ", ".join(ends)


def cancelled(elastic: ElasticRun, way: str, body: dict[str, Any], *, state: str) -> dict[str, Any]:
    """Creates an order, cancels it during or just after a state, and returns the ended order."""
    order = elastic.follow(way, elastic.ask("POST", f"/rollout/{way}", body), state)
    elastic.ask("POST", f"/rollout/{way}/{order['request_id']}/cancel", refusals=(409,))
    return elastic.follow(way, order)


def cycles(folder: Path, *, times: int, seed: int, overrides: Sequence[str]) -> bool:
    """Runs ``times`` cycles. Returns whether all cycles ended and no sample was lost."""
    chance = random.Random(seed)
    harms = chance.sample(HARMS, len(HARMS))
    planned = [harms[number % len(harms)] for number in range(times)]
    with LiveRun(folder, *CYCLE_RUN, *overrides) as live:
        live.wait_step(WARM_STEPS)
        elastic = ElasticRun(live)
        before: dict[str, float] = {}
        for number, harm in enumerate(planned, start=1):
            engines, began = chance.randint(1, MOST - 1), time.monotonic()
            how = cycle(elastic, harm, engines=engines)
            took = time.monotonic() - began
            print(f"{number:>3}. {engines} engines, {' in '.join(harm)}: {how}; {took:.0f} s", flush=True)
            before = before or memory(live)
        after = memory(live)
        step = elastic.ask("GET", "/run")["step"]
        live.wait_step(step + 2)
        elastic.ask("POST", "/run/stop")
        run = live.finish()
    for kind, megabytes in before.items():
        print(f"{kind}: {megabytes:.0f} MB after the first cycle, {after[kind]:.0f} MB after the last")
    print(books(run), flush=True)
    return run.summary["ledger"]["lost"] == run.summary["ledger"]["trained_twice"] == 0


# -- an idle gateway --------------------------------------------------------------------------------------------------
def pairs(folder: Path, *, times: int, overrides: Sequence[str]) -> bool:
    """Compares samples per second with and without a gateway."""
    rates: dict[str, list[float]] = {"local": [], "none": []}
    for turn in range(times):
        for name in sorted(rates, reverse=turn % 2 == 0):
            settings = (f"gateway={name}", f"seed={turn}", *PAIR_RUN, *overrides)
            rates[name].append(run_to_end(folder / f"{name}-{turn}", *settings).summary["samples_per_s"])
    ratios = [ours / theirs for ours, theirs in zip(rates["local"], rates["none"], strict=True)]
    print(f"samples/s with a gateway over without one: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    print(
        f"  median {median(ratios):.4f} ({times} pairs), {median(rates['none']):.0f} samples/s without one", flush=True
    )
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adds", type=int, default=0, help="number of times one engine is added and removed")
    parser.add_argument(
        "--cycles", type=int, default=0, help="number of joins and leaves of engines with kills or cancels"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="overrides of the runs, key=value")
    parser.add_argument("--leaves", type=int, default=0, help="number of times an engine leaves")
    parser.add_argument("--stop", type=float, default=0.0, help="seconds of each stop of a new engine")
    parser.add_argument("--pairs", type=int, default=0, help="pairs of runs with and without a gateway")
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    good = True
    with tempfile.TemporaryDirectory(prefix="relax-elastic-") as folder:
        if given.adds:
            good &= adds(Path(folder) / "adds", times=given.adds, overrides=given.overrides)
        if given.leaves:
            good &= leaves(Path(folder) / "leaves", times=given.leaves, overrides=given.overrides)
        if given.stop:
            good &= stops(Path(folder) / "stops", seconds=given.stop, overrides=given.overrides)
        if given.pairs:
            good &= pairs(Path(folder), times=given.pairs, overrides=given.overrides)
        if given.cycles:
            good &= cycles(Path(folder) / "cycles", times=given.cycles, seed=given.seed, overrides=given.overrides)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
