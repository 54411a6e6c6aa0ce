"""Offers bad engines to a run under load: ``python -m benchmarks.elastic_offers --offers 200``.

Each order offers one server of each kind by its address, as its owner would announce it: one with other weights than
the published ones, one for which every file ends early, one that stays at its old weights (`benchmarks.bad_engine`),
another model, another number of layers, another dtype, another vocabulary. All are real engines, and the run is the
demo with a server of its own. Printed are how many offers of each kind were refused and in which words, the tokens that
the bad engines have sampled, by their own count, and what the ledger of the run counts. The exit code is 1 if one
joined, sampled a token, or was refused without words.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bad_engine import KINDS
from benchmarks.elastic import WARM_STEPS, books
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.tools.make_tiny import tiny_model_folder
from tests.integration.elastic_run import OVERRIDES, ElasticRun
from tests.integration.embedded_servers import KEY, attached_to, server_command, servers
from tests.integration.live_run import LiveRun

JOIN_S = 20  # an order's deadline, which ends the offer of a server that refuses all weights


def other_model(folder: Path, name: str, values: Mapping[str, Any]) -> Path:
    """Writes the demo's model with other values in its config.json and returns the folder."""
    mine = folder / name
    shutil.copytree(tiny_model_folder("tiny_qwen3", task="reverse_digits"), mine)
    config = json.loads((mine / "config.json").read_text()) | values
    (mine / "config.json").write_text(json.dumps(config))
    return mine


def commands(folder: Path) -> dict[str, list[str]]:
    """Returns the command of one server of each kind, and of the good one under "good"."""
    model = tiny_model_folder("tiny_qwen3", task="reverse_digits")
    rope = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
    return {
        "good": server_command(model, folder),
        **{
            kind: server_command(model, folder, "--load-weights", module=("benchmarks.bad_engine", kind))
            for kind in KINDS
        },
        "other_model": server_command(other_model(folder, "rope", rope), folder),
        "other_layers": server_command(
            other_model(folder, "layers", {"num_hidden_layers": 1, "layer_types": None}), folder
        ),
        "other_dtype": server_command(model, folder, "--dtype", "bfloat16"),
        "other_vocabulary": server_command(other_model(folder, "vocabulary", {"vocab_size": 64}), folder),
    }


def offers(folder: Path, *, count: int, overrides: Sequence[str]) -> bool:
    """Offers ``count`` bad servers; returns whether all were refused in words and none sampled a token."""
    refused: Counter[str] = Counter()
    said: dict[str, str] = {}
    joined: list[str] = []
    with servers(folder, commands(folder)) as urls:
        good = urls.pop("good")
        with LiveRun(folder / "run", *OVERRIDES, *attached_to(good, folder), *overrides) as live:
            live.wait_step(WARM_STEPS)
            elastic = ElasticRun(live)
            while refused.total() + len(joined) < count:
                body = {"engine_urls": list(urls.values()), "timeout_secs": JOIN_S, "partial": "keep_partial"}
                order = elastic.order("scale_out", body)
                rows = {row["id"]: row for row in elastic.ask("GET", "/rollout/engines")["engines"]}
                for kind, url in urls.items():
                    row = max((row for row in rows.values() if row["url"] == url), key=lambda row: row["since"])
                    if row["state"] == "failed" and (words := row["last_failure"]):
                        refused[kind] += 1
                        said.setdefault(kind, words)
                    else:
                        joined.append(f"{kind}: {row['state']} in {order['status']}")
            elastic.ask("POST", "/run/stop")
            run = live.finish()
        tokens = {kind: sampled(url) for kind, url in urls.items()}
    for kind, number in refused.items():
        print(f"{kind}: {number} refused, {tokens[kind]} tokens sampled; {re.sub(r'/[^ ]*/', '…/', said[kind])}")
    print(f"{refused.total()} of {refused.total() + len(joined)} offers refused {joined or ''}")
    others = sum(one["samples"] for one in run.summary["engines"][1:])
    print(f"{others} samples of the run are of a bad engine; {books(run)}", flush=True)
    lossless = run.summary["ledger"]["lost"] == run.summary["ledger"]["trained_twice"] == 0
    return not joined and not others and not any(tokens.values()) and lossless


def sampled(url: str) -> int:
    """Returns how many tokens an engine has sampled since its start, by its own count."""
    client = EngineClient(url, KEY, request_timeout_s=30.0, control_timeout_s=30.0)
    try:
        return int(client.loads()["generated_tokens"])
    finally:
        client.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--offers", type=int, default=200, help="how many servers are offered")
    parser.add_argument("overrides", nargs="*", help="key=value of the run")
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory(prefix="relax-offers-") as folder:
        return 0 if offers(Path(folder), count=given.offers, overrides=given.overrides) else 1


if __name__ == "__main__":
    sys.exit(main())
