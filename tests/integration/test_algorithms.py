"""Whole runs of what an algorithm may ask of the system: groups refused before the bus, statistics over a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.observe.event_log import read_metrics
from tests.integration.live_run import run_to_end

pytestmark = pytest.mark.integration

SHORT = ("run.steps=6", "eval.every=0", "run.save_every=0", "run.export_hf=false")


def test_refused_groups_are_persisted_and_replaced(tmp_path: Path) -> None:
    """Nearly greedy sampling: most groups have one reward. Taking turns, so that a hole in a step must be filled."""
    run = run_to_end(
        tmp_path / "run", *SHORT, "algo=dapo", "mode=colocate", "rollout.temperature=0.2", "algo.max_dropped_in_a_row=4"
    )
    assert run.code == 0, run.output
    run.assert_books_closed()
    books = run.summary["ledger"]
    assert books["trained"] == 6 * 8 * 16
    assert set(books["dropped"]) == {"all_equal"} and books["dropped"]["all_equal"] % 16 == 0
    # After four in a row one is kept, so at most four are refused for one that is trained on.
    assert books["dropped"]["all_equal"] <= 4 * books["trained"] + 4 * 16
    assert run.summary["staleness"]["max"] == 0


def test_advantages_are_normalized_over_the_step(tmp_path: Path) -> None:
    """With a KL in the reward, so that the reference and the recomputed log-probs reach the advantages; without what
    was cut at its limit; and in a run that the same seed is to give again."""
    keys = ("algo=reinforce_pp", "algo.group_baseline=false", "algo.kl_coef=0.05", "algo.kl_placement=reward")
    strict = ("algo.kl_estimator=k1", "algo.old_logprobs=actor_fwd", "mode.max_staleness=0")
    cut = ("rollout.mask_truncated=true", "rollout.max_new_tokens=7", "algo.correction=tis_normalized")
    run = run_to_end(tmp_path / "run", *SHORT, *keys, *strict, *cut)
    assert run.code == 0, run.output
    run.assert_books_closed()
    books = run.summary["ledger"]
    assert set(books["dropped"]) == {"truncated"} and books["dropped"]["truncated"] > 0
    assert books["trained"] + books["dropped"]["truncated"] == 6 * 8 * 16
    for values in run.steps():  # over the very groups of the step, as nothing is stale
        assert values["algorithm/advantage"] == pytest.approx(0.0, abs=1e-5)
        assert 0.5 < values["algorithm/advantage_size"] <= 1.0
        assert 0.9 < values["algorithm/tis_weight"] < 1.1
        assert values["samples"] == pytest.approx(8 * 16 * (1 - values["truncated"]))
    # The last bits of a forward pass depend on which groups it has: on those of a whole step, and not on timing.
    assert run.summary["run"]["repeatable"] is True
    passes = [one for one in read_metrics(run.folder) if one.source in ("actor_fwd", "reference")]
    assert len(passes) == 2 * 6 and {one.values["groups"] for one in passes} == {8.0}
