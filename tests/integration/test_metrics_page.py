"""Compares docs/metrics.md with a run: the page describes every metric, and the run has all required metrics."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from relax_core.observe.event_log import read_metrics
from tests.integration.live_run import FinishedRun
from tests.observe.metrics_page import always, not_described

pytestmark = pytest.mark.integration


def test_the_page_lists_what_a_run_writes(strict: FinishedRun) -> None:
    records = read_metrics(strict.folder)
    tags = {f"{record.source}/{name}" for record in records for name in record.values}
    assert not not_described(tags), "docs/metrics.md does not describe them"
    assert not always() - tags, "docs/metrics.md says that every run has them"
    reader = EventAccumulator(str(strict.folder / "tensorboard"), size_guidance={"histograms": 0, "scalars": 0})
    reader.Reload()
    assert set(reader.Tags()["scalars"]) == tags - {"run/resumed"}
    histograms = ("response_tokens", "staleness", "reward", "advantage")
    assert set(reader.Tags()["histograms"]) == {f"actor/{name}/distribution" for name in histograms}
    steps = [record.values for record in records if record.source == "actor"]
    lengths = reader.Histograms("actor/response_tokens/distribution")
    assert [event.step for event in lengths] == list(range(len(steps)))
    for event, values in zip(lengths, steps, strict=True):
        assert event.histogram_value.num == values["samples"]
        assert event.histogram_value.max == values["response_tokens/max"]
        # In an on-policy run, the engine's entropy equals the trainer's entropy.
        assert values["entropy"] == pytest.approx(values["algorithm/surprisal"], abs=2e-5)
