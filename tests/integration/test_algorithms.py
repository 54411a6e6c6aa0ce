"""Tests whole runs with special algorithms: groups that are refused before the bus, statistics over a step.

The first run also sends notifications.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_core.observe.alarms import read_alarms
from relax_core.observe.event_log import read_metrics
from tests.integration.live_run import FinishedRun, run_to_end
from tests.observe.receivers import http_receiver
from tests.ports import free_port

pytestmark = pytest.mark.integration

RULE, SECRET = "actor/tokens > 1 for 3 steps", "a-secret"
SHORT = ("run.steps=6", "eval.every=0", "run.save_every=0", "run.export_hf=false")


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> tuple[FinishedRun, list[tuple[str, str]]]:
    """Returns a colocate run with nearly greedy sampling: most groups have equal rewards and must be replaced.

    The run notifies two receivers. One receiver does not exist. Also returns the messages to the existing receiver.
    """
    folder = tmp_path_factory.mktemp("refusing")
    with http_receiver() as told:
        urls = folder / "urls"
        urls.write_text(f"json://me:{SECRET}@127.0.0.1:{told.port}\njson://127.0.0.1:{free_port()}\n")
        urls.chmod(0o600)
        run = run_to_end(
            folder / "run",
            *(*SHORT, "algo=dapo", "mode=colocate", "rollout.temperature=0.2", "algo.max_dropped_in_a_row=4"),
            *(f"notify.urls_file={urls}", f"notify.rules=['{RULE}']", "notify.events=[started, rule, finished]"),
        )
    assert run.code == 0, run.output
    return run, told.messages


def test_refused_groups_are_persisted_and_replaced(refusing: tuple[FinishedRun, list[tuple[str, str]]]) -> None:
    run, _ = refusing
    run.assert_all_samples_accounted()
    books = run.summary["ledger"]
    assert books["trained"] == 6 * 8 * 16
    assert set(books["dropped"]) == {"all_equal"} and books["dropped"]["all_equal"] % 16 == 0
    # After four dropped groups in a row the next group is kept. So the run drops at most four groups per trained group.
    assert books["dropped"]["all_equal"] <= 4 * books["trained"] + 4 * 16
    assert run.summary["staleness"]["max"] == 0


def test_a_run_tells_of_its_start_of_a_rule_that_is_true_and_of_its_end(
    refusing: tuple[FinishedRun, list[tuple[str, str]]],
) -> None:
    run, messages = refusing
    titles = [title.partition(": ")[2] for title, _ in messages]
    assert titles == ["the run has started", RULE, "the run has finished"], messages
    texts = [text for _, text in messages]
    assert "actor/tokens is " in texts[1] and "of 6" in texts[1] and str(run.folder) in texts[1]
    assert [alarm.event for alarm in read_alarms(run.folder)] == ["started", "rule", "finished"]
    assert run.output.count("did not accept") == 3, "each of the three messages is tried and logged"
    assert SECRET not in run.output + "".join(texts)
    assert not any(SECRET in file.read_text(errors="replace") for file in (run.folder / "logs").glob("*.log"))


def test_advantages_are_normalized_over_the_step(tmp_path: Path) -> None:
    """The reward includes a KL, so reference and recomputed log-probs affect the advantages. Truncated samples are
    masked. The run is repeatable with its seed.
    """
    keys = ("algo=reinforce_pp", "algo.group_baseline=false", "algo.kl_coef=0.05", "algo.kl_placement=reward")
    strict = ("algo.kl_estimator=k1", "algo.old_logprobs=actor_fwd", "mode.max_staleness=0")
    cut = ("rollout.mask_truncated=true", "rollout.max_new_tokens=7", "algo.correction=tis_normalized")
    run = run_to_end(tmp_path / "run", *SHORT, *keys, *strict, *cut)
    assert run.code == 0, run.output
    run.assert_all_samples_accounted()
    books = run.summary["ledger"]
    assert set(books["dropped"]) == {"truncated"} and books["dropped"]["truncated"] > 0
    assert books["trained"] + books["dropped"]["truncated"] == 6 * 8 * 16
    for values in run.steps():  # over the groups of the step, because no group is stale
        assert values["algorithm/advantage"] == pytest.approx(0.0, abs=1e-5)
        assert 0.5 < values["algorithm/advantage_size"] <= 1.0
        assert 0.9 < values["algorithm/tis_weight"] < 1.1
        assert values["samples"] == pytest.approx(8 * 16 * (1 - values["truncated"]))
    # The last bits of a forward pass depend on its groups. These are always the groups of one complete step, at any
    # timing.
    assert run.summary["run"]["repeatable"] is True
    passes = [metric for metric in read_metrics(run.folder) if metric.source in ("actor_fwd", "reference")]
    assert len(passes) == 2 * 6 and {record.values["groups"] for record in passes} == {8.0}
