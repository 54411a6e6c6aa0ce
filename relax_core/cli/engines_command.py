"""Shows, adds and removes the engines of a run that has a gateway: ``relax engines RUN``.

  relax engines RUN                        lists the present and former engines of the run
  relax engines RUN add 2                  adds two engines; --dry-run only prints the resources that they would take
  relax engines RUN add http://HOST:PORT   adds an external server, in a run with engine.urls
  relax engines RUN remove 1               removes the newest engine
  relax engines RUN remove engine-3        removes this engine; an external server can be named by its address, too
  relax engines RUN cancel REQUEST_ID      cancels an order that has not ended
  relax engines RUN watch                  lists the engines once a second

The command waits until the order has ended. The exit code is 1 if the order failed or was cancelled, and 2 if it was
refused.
"""

from __future__ import annotations

import argparse
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from relax_core.server.gateway_client import GatewayClient, GatewayRefused, GatewayUnreachable

FOLLOW_S = 0.5
WATCH_S = 1.0
ENDED = ("ACTIVE", "COMPLETED", "NOOP", "FAILED", "CANCELLED")
GONE = ("left", "failed")
_FAILED, _REFUSED = 1, 2
GIB = 1 << 30


def main(words: Sequence[str]) -> int:
    """Runs the command and returns its exit code. Argparse ends the process for unknown arguments."""
    parser = argparse.ArgumentParser(
        prog="relax engines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a live run")
    parser.add_argument("action", nargs="?", choices=["add", "remove", "cancel", "watch"])
    parser.add_argument("what", nargs="*", help="number of engines, engine names, or order id")
    parser.add_argument("--force", action="store_true", help="remove: move running samples to other engines at once")
    parser.add_argument("--keep-partial", action="store_true", help="add: keep the other new engines if one fails")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for the end of the order")
    parser.add_argument("--dry-run", action="store_true", help="add, remove: only print the effect")
    given = parser.parse_args(words)
    try:
        return _act(GatewayClient(given.run), given)
    except (GatewayRefused, GatewayUnreachable, ValueError) as error:
        print(f"relax engines: {error}", file=sys.stderr)
        return _REFUSED


def _act(client: GatewayClient, given: argparse.Namespace) -> int:
    match given.action:
        case "add":
            body: dict[str, Any] = {"partial": "keep_partial" if given.keep_partial else "rollback_all"}
            if given.what and all("://" in word for word in given.what):
                body["engine_urls"] = given.what
            else:
                body["num_replicas"] = len(_present(client)) + _number(given)
            return _order(client, "scale_out", body, given)
        case "remove":
            return _order(client, "scale_in", _remove_body(client, given), given)
        case "cancel":
            return _cancel(client, given)
        case "watch":
            while True:
                lines = [*_table(client), ""]
                print("\n".join(lines), flush=True)
                time.sleep(WATCH_S)
        case _:
            print("\n".join(_table(client)))
            return 0


def _number(given: argparse.Namespace) -> int:
    if len(given.what) != 1 or not given.what[0].isdecimal() or int(given.what[0]) < 1:
        raise ValueError(f"{given.action} {' '.join(given.what)}: name how many engines, as in {given.action} 2")
    return int(given.what[0])


def _remove_body(client: GatewayClient, given: argparse.Namespace) -> dict[str, Any]:
    if given.what and all(word.startswith("engine-") for word in given.what):
        return {"engine_ids": given.what, "force": given.force}
    if given.what and all("://" in word for word in given.what):
        return {"engine_urls": given.what, "force": given.force}
    present, gone = _present(client), _number(given)
    if gone >= len(present):
        raise ValueError(f"remove {gone}: the run has {len(present)} engines. Engines of its start cannot be removed.")
    return {"num_replicas": len(present) - gone, "force": given.force}


def _present(client: GatewayClient) -> list[dict[str, Any]]:
    return [row for row in client.ask("GET", "/rollout/engines")["engines"] if row["state"] in ("joining", "serving")]


def _order(client: GatewayClient, way: str, body: dict[str, Any], given: argparse.Namespace) -> int:
    if given.dry_run:
        print("\n".join(_dry_run(client.ask("POST", f"/rollout/{way}", {**body, "dry_run": True}))))
        return 0
    order = client.ask("POST", f"/rollout/{way}", body, key=uuid.uuid4().hex)
    print(f"order {order['request_id']}: {way} {body}", flush=True)
    return _FAILED if not given.no_wait and _follow(client, way, order) in ("FAILED", "CANCELLED") else 0


def _dry_run(effect: dict[str, Any]) -> Iterator[str]:
    """Yields the effect of an order, the resources of new engines, and warnings."""
    gone = f"; {', '.join(effect['engine_ids'])} would leave" if effect["engine_ids"] else ""
    yield f"{effect['engines_now']} engines would become {effect['engines_then']}{gone}"
    if effect["memory_bytes"] is not None:
        free = "" if effect["free_memory_bytes"] is None else f" of {effect['free_memory_bytes'] / GIB:.1f} GiB free"
        cores = "" if effect["machine_cores"] is None else f" of {effect['machine_cores']}"
        yield f"they take {effect['memory_bytes'] / GIB:.1f} GiB{free}, and {effect['cores']}{cores} cores"
    yield from (f"but {warning}" for warning in effect["warnings"])


def _cancel(client: GatewayClient, given: argparse.Namespace) -> int:
    if len(given.what) != 1 or not given.what[0].isalnum():
        raise ValueError("cancel: name one order, as in cancel 0f7e…; relax engines RUN lists the open orders")
    for way in ("scale_out", "scale_in"):
        try:
            order = client.ask("POST", f"/rollout/{way}/{given.what[0]}/cancel")
        except GatewayRefused as refused:
            if refused.problem.get("status") != 404 or way == "scale_in":
                raise
        else:
            return 0 if given.no_wait or _follow(client, way, order) == "CANCELLED" else _FAILED
    raise AssertionError("the second kind of order returns or raises")


def _follow(client: GatewayClient, way: str, order: dict[str, Any]) -> str:
    """Prints each state of an order with its time, and returns the last state.

    Every order ends by a deadline of the run.
    """
    shown = 0
    while True:
        for change in order["history"][shown:]:
            print(f"  {time.strftime('%H:%M:%S', time.localtime(change['at']))} {change['state']}", flush=True)
        shown = len(order["history"])
        if order["status"] in ENDED:
            break
        time.sleep(FOLLOW_S)
        order = client.ask("GET", f"/rollout/{way}/{order['request_id']}")
    if order["engine_ids"]:
        print(f"  {', '.join(order['engine_ids'])}")
    if order["failure"]:
        print(f"relax engines: {order['failure']}", file=sys.stderr)
    return str(order["status"])


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _table(client: GatewayClient) -> Iterator[str]:
    """Yields the lines of a table of engines, former engines last, and the open orders."""
    run = client.ask("GET", "/run")
    rows = client.ask("GET", "/rollout/engines")["engines"]
    yield f"step {run['step']} of {run['steps']}" + (", stopping" if run["stopping"] else "")
    loads = f"{'runs':>5} {'waits':>5} {'tokens/s':>8} {'cache':>5}"
    yield f"{'engine':<11} {'state':<8} {'origin':<6} {'weights':>7} {loads}  address"
    for row in sorted(rows, key=lambda engine: engine["state"] in GONE):
        runs, waits, rate = (_count(row[name]) for name in ("samples_running", "samples_waiting", "tokens_per_s"))
        share = "–" if row["cache_share"] is None else f"{row['cache_share']:.0%}"
        loads = f"{runs:>5} {waits:>5} {rate:>8} {share:>5}"
        words = row["last_failure"] if row["state"] == "failed" else row["url"]
        yield (
            f"{row['id']:<11} {row['state']:<8} {row['origin']:<6} {row['weight_version']:>7} {loads}  {words}".rstrip()
        )
    for way in ("scale_out", "scale_in"):
        for order in client.ask("GET", f"/rollout/{way}?limit=1")["requests"]:
            if order["status"] not in ENDED:
                yield f"{way} {order['request_id']}: {order['status']} {', '.join(order['engine_ids'])}".rstrip()
