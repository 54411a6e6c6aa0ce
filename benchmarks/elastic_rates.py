"""Measures what further engines bring: ``python -m benchmarks.elastic_rates --most 4``.

The engines speak the protocol and have a fixed rate: each decode step waits `tests.engines.slow_engine.STEP_S` seconds,
and 16 samples decode at one time, so that several of them leave the cores of this machine idle. A run of the demo with
one of them takes the others in by their addresses, one after the other. Printed are the samples that were trained in a
second with each number of engines, beside those with one engine times their number.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.elastic import WARM_STEPS, books, step_ms
from relax_core.tools.make_tiny import tiny_model_folder
from tests.integration.elastic_run import OVERRIDES, ElasticRun
from tests.integration.embedded_servers import attached_to, server_command, servers
from tests.integration.live_run import LiveRun

STEPS = 40  # train steps over which each rate is measured
SETTLE = 6  # and steps before that, whose samples the engines of before have begun
REACH = 0.9


def rates(folder: Path, *, most: int, overrides: Sequence[str]) -> bool:
    """Prints samples/s with 1 to ``most`` engines; returns whether each is at least `REACH` of linear."""
    model = tiny_model_folder("tiny_qwen3", task="reverse_digits")
    slow = server_command(model, folder, module=("tests.engines.slow_engine",))
    begins: list[int] = []
    with servers(folder, {str(number): slow for number in range(most)}) as urls:
        first, *others = urls.values()
        with LiveRun(folder / "run", *OVERRIDES, *attached_to(first, folder), *overrides) as live:
            live.wait_step(WARM_STEPS)
            elastic = ElasticRun(live)
            for number in range(most):
                if number:
                    order = elastic.order("scale_out", {"engine_urls": [others[number - 1]]})
                    assert order["status"] == "ACTIVE", order
                begins.append(elastic.ask("GET", "/run")["step"] + SETTLE)
                live.wait_step(begins[-1] + STEPS)
            elastic.ask("POST", "/run/stop")
            run = live.finish()
    ended = [at for at, _ in step_ms(run.folder)]  # when each train step did
    found = [128 * STEPS / (ended[begin + STEPS] - ended[begin]) for begin in begins]
    for number, rate in enumerate(found, start=1):
        print(f"{number} engines: {rate:.1f} samples/s, {rate / found[0] / number:.3f} of linear")
    print(books(run), flush=True)
    return all(rate >= REACH * number * found[0] for number, rate in enumerate(found, start=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=4, help="engines at the end")
    parser.add_argument("overrides", nargs="*", help="key=value of the run")
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory(prefix="relax-rates-") as folder:
        return 0 if rates(Path(folder), most=given.most, overrides=given.overrides) else 1


if __name__ == "__main__":
    sys.exit(main())
