"""Common parts of all benchmarks: whole runs, engines, comparisons of alternating variants, and tables of ratios.

A machine's speed changes with its load. Therefore the variants ("ways") of a comparison alternate within one
invocation. Every second round has the opposite order. A ratio is the median over the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from relax_core.observe.event_log import ACTOR, EVENTS_FOLDER, MetricRecord, by_step, read_metrics
from relax_core.observe.trackers.file_sinks import METRICS_FILE

if TYPE_CHECKING:
    from relax_core.config.schema import EngineConfig
    from relax_core.engines.engine_process import EngineProcess
    from relax_core.engines.protocol.engine_client import EngineClient

HERE = Path(__file__).resolve().parents[1]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
QUIET_RUN = ("eval.every=0", "run.save_every=0", "run.export_hf=false", "run.panel=false")
DEADLINE_S = 3600.0

Metrics = dict[str, float]


# -- the command line -------------------------------------------------------------------------------------------------
def command_line(doc: str | None, *, rounds: int = 3) -> argparse.ArgumentParser:
    """Returns a parser with the arguments that all benchmarks have: ``--rounds`` and ``--json``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="number of measurements of each way")
    parser.add_argument("--json", type=Path, help="file for the metrics of all rounds, as JSON")
    return parser


def machine() -> str:
    """Returns the number of cores and the load, for the first line of a report."""
    return f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"


# -- whole runs -------------------------------------------------------------------------------------------------------
def python(module: str, *words: str, checkout: Path = HERE, deadline_s: float = DEADLINE_S, **env: str) -> str:
    """Runs ``python -m module`` with one thread per process and returns its output. Exits if the module fails."""
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(
        command,
        cwd=checkout,
        env=os.environ | ONE_THREAD | {"PYTHONPATH": str(checkout)} | env,
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """Holds the summary and the metric records of a finished run. The run's folder is no longer needed."""

    summary: dict[str, Any]
    records: Sequence[MetricRecord]

    def steps(self, source: str = ACTOR) -> dict[int, Mapping[str, float]]:
        """Returns the metrics of a source by train step."""
        return dict(by_step(self.records, source))

    def samples_per_s(self, *, skipped: int) -> float:
        """Returns the median samples per second, over the steps from ``skipped`` to the second last."""
        steps = [values for _, values in sorted(self.steps().items())][skipped:-1]
        return median(1e3 * step["samples"] / step["step_ms"] for step in steps)


def run_relax(folder: Path, *words: str, checkout: Path = HERE, deadline_s: float = DEADLINE_S) -> FinishedRun:
    """Runs ``python -m relax_core`` in ``folder``. Exits if the run fails or its ledger has lost a sample."""
    python("relax_core", f"run.dir={folder}", "run.panel=false", *words, checkout=checkout, deadline_s=deadline_s)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    ledger = summary["ledger"]
    if ledger["lost"] or ledger["trained_twice"]:
        sys.exit(f"{' '.join(words)}: the ledger has lost samples or trained some twice: {ledger}")
    return FinishedRun(summary=summary, records=run_records(folder))


def run_records(folder: Path) -> list[MetricRecord]:
    """Returns the metrics of a run. Checkouts older than the event log store the metrics in metrics.jsonl."""
    if (folder / EVENTS_FOLDER).is_dir():
        return read_metrics(folder)
    found = []
    for line in (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        values = {name: math.nan if value is None else value for name, value in record["values"].items()}
        given = {name: record[name] for name in ("source", "step", "time_s")}
        found.append(MetricRecord(values=values, **given))
    return found


# -- comparisons ------------------------------------------------------------------------------------------------------
@dataclass
class Comparison:
    """Holds the metrics of each way, with one entry per round."""

    title: str
    found: dict[str, list[Metrics]] = field(default_factory=dict)

    def add(self, way: str, figures: Metrics) -> None:
        """Adds the metrics of one round."""
        self.found.setdefault(way, []).append(figures)

    def median(self, way: str, figure: str) -> float:
        """Returns the median over the rounds."""
        return median(figures[figure] for figures in self.found[way])

    def ratios(self, way: str, figure: str, *, base: str) -> list[float]:
        """Returns for each round the ratio of a metric to the metric of the way ``base``."""
        return [
            figures[figure] / base_figures[figure]
            for figures, base_figures in zip(self.found[way], self.found[base], strict=False)
        ]

    def ratio(self, way: str, figure: str, *, base: str) -> float:
        """Returns the median of the rounds' ratios."""
        return median(self.ratios(way, figure, base=base))

    def table(self, *, base: str | None = None, ratio_of: Sequence[str] = ()) -> str:
        """Returns a Markdown table: rows are ways, columns are metrics. The last columns are ratios to ``base``."""
        figures = list(
            dict.fromkeys(name for rounds in self.found.values() for round_figures in rounds for name in round_figures)
        )
        head = ["", *figures, *(f"{name} of {base}" for name in ratio_of)]
        rows = [head, ["---"] * len(head)]
        for way, rounds in self.found.items():
            cells = [_short(self.median(way, name)) if name in rounds[0] else "" for name in figures]
            cells += [self._spread(way, name, base) if base is not None else "" for name in ratio_of]
            rows.append([way, *cells])
        return "\n".join([f"**{self.title}**", "", *("| " + " | ".join(row) + " |" for row in rows)])

    def _spread(self, way: str, figure: str, base: str) -> str:
        ratios = self.ratios(way, figure, base=base)
        middle = f"{median(ratios):.3f}"
        return middle if way == base else f"{middle} ({min(ratios):.3f} to {max(ratios):.3f})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def take_turns(
    title: str, ways: Mapping[str, Callable[[int], Metrics]], *, rounds: int, warm_up: bool = True
) -> Comparison:
    """Calls each way once in every round, with the round's number, and prints the progress.

    With ``warm_up``, calls each way once before the first round, with round -1, and discards the result.
    """
    comparison = Comparison(title)
    for number in range(-1 if warm_up else 0, rounds):
        for way in list(ways)[:: -1 if number % 2 else 1] if number >= 0 else ways:
            figures = ways[way](number)
            if number >= 0:
                comparison.add(way, figures)
        if number >= 0:
            print(f"{title}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    comparison.found = {way: comparison.found[way] for way in ways if way in comparison.found}
    return comparison


def write_report(file: Path | None, *comparisons: Comparison) -> None:
    """Writes all metrics of all rounds as JSON, if a file is given."""
    if file is not None:
        report = {"machine": machine(), **{comparison.title: comparison.found for comparison in comparisons}}
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


# -- engines ----------------------------------------------------------------------------------------------------------
VOCAB, PROMPT_TOKENS = 50, 16
TOKEN = "token-of-the-benchmark"
ENGINE_S = 600.0  # timeout of each engine call


def demo_model(
    *, hidden: int = 64, layers: int = 2, inter: int = 192, vocab: int = VOCAB, endless: bool = False
) -> Any:
    """Returns a random Qwen3, by default of the demo's size (102k parameters). With ``endless`` it has no end token."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=inter,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=None if endless else 3,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    if endless:
        model.generation_config.eos_token_id = None
    return model


def engine_config(**changes: Any) -> EngineConfig:
    """Returns the settings of an embedded engine with one thread."""
    from relax_core.config.schema import EngineConfig

    given: dict[str, Any] = {
        "name": "embedded",
        "count": 1,
        "port": 0,
        "max_running_samples": 256,
        "max_total_tokens": 65536,
        "context_length": 256,
        "threads": 1,
        "start_timeout_s": 300.0,
    }
    return EngineConfig(**given | changes)


@contextmanager
def started_engine(
    scratch: Path, model_folder: Path, *, engine: EngineConfig | None = None, dtype: str = "float32", **launch: Any
) -> Iterator[tuple[EngineProcess, EngineClient]]:
    """Yields an engine process that serves the weights of ``model_folder``, and its client. Stops both at the end."""
    from relax_core.engines.build_client import build_client
    from relax_core.engines.engine_process import EngineLaunch, EngineProcess

    token_file, settings = scratch / "token", engine or engine_config()
    token_file.touch(mode=0o600)
    token_file.write_text(TOKEN)
    given: dict[str, Any] = {"load_weights": True} | launch
    log_file = scratch / f"{settings.name}-{model_folder.name}.log"
    process = EngineProcess.start(
        EngineLaunch(
            model_folder=model_folder, engine=settings, dtype=dtype, token_file=token_file, log_file=log_file, **given
        )
    )
    client = build_client(settings, process.url, model_folder=model_folder, token_file=token_file)
    try:
        yield process, client
    finally:
        client.close()
        process.stop(timeout_s=10.0)
