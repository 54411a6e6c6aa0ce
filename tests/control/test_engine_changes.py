"""Tests how engines join and leave an attempt of the services."""

from __future__ import annotations

import ray

from relax_core.roles.worker import EngineReport
from tests.control.changes_harness import Run, joined, run

__all__ = ["run"]


def test_an_engine_serves_once_it_has_the_weights_that_were_newest_when_it_was_up(run: Run) -> None:
    run.publish(4)
    run.tell(0, engine=EngineReport(url="http://h:0", version=-1))
    number = run.join()
    run.tell(number, engine=EngineReport(url="http://h:1", version=-1))
    run.tick_until("it is not seen", lambda: run.changes._joining[number].wanted == 4)
    for version in (-1, 3):
        run.publish(9)
        run.tell(number, engine=EngineReport(url="http://h:1", version=version))
        for _ in range(3):
            run.tick()
        assert run.states() == {0: "serving", number: "joining"}
    run.tell(number, engine=EngineReport(url="http://h:1", version=4))
    for _ in range(3):
        run.tick()
    assert run.states()[number] == "joining" and not run.compared, "no other engine has weights yet"
    run.tell(0, engine=EngineReport(url="http://h:0", version=4))
    run.tick_until("it does not serve", lambda: run.states()[number] == "serving")
    assert run.compared == [("http://h:1", "http://h:0")]


def test_an_engine_whose_owner_is_restarted_while_it_is_compared_is_compared_anew(run: Run) -> None:
    run.publish(4)
    run.tell(0, engine=EngineReport(url="http://h:0", version=4))
    number, run.compares = run.join(), False
    run.tell(number, engine=EngineReport(url="http://h:1", version=4))
    run.tick_until("it is not compared", lambda: run.compared == [("http://h:1", "http://h:0")])
    run.compares = True
    run.tell(number, engine=EngineReport(url="http://h:2", version=4))
    run.tick_until("it does not serve", lambda: run.states()[number] == "serving")
    assert run.compared[1:] == [("http://h:2", "http://h:0")]


def test_an_engine_that_leaves_finishes_its_samples_or_hands_them_on(run: Run) -> None:
    first, second = joined(run), joined(run)
    run.changes.leave(second)
    for _ in range(3):
        run.tick()
    assert run.states()[second] == "leaving" and run.changes.leaving() == {second}
    assert run.changes.stay(second) and run.states()[second] == "serving"

    run.changes.leave(second)
    run.now += 29.0
    run.tick()
    assert run.states()[second] == "leaving"
    run.now += 1.0
    run.tick_until("it is not moved", lambda: run.states()[second] == "moving")
    ray.get(run.services.rollouts[1].owe.remote(0))
    run.tick_until("it is not removed", lambda: run.services.removed == [second])
    assert run.states() == {0: "serving", first: "serving"} and not run.changes.leaving()
    assert not run.changes.stay(second)
    run.tick()
    assert set(run.health.beats) == {"engine-0", "engine-1"}, "its heartbeat is removed"

    ray.get(run.services.rollouts[1].owe.remote(3))
    run.changes.leave(first, at_once=True)
    assert run.states()[first] == "moving"
    run.now += 11.0  # more than MOVE_S: the engine is removed although a rollout worker still has open samples
    run.tick_until("it is not removed", lambda: run.services.removed == [second, first])


def test_the_end_of_an_added_engine_is_no_failure_of_the_run(run: Run) -> None:
    serving = joined(run)
    ray.kill(run.services.owners[f"engine-{serving}"])
    run.tick_until("it is not removed", lambda: run.services.removed == [serving])
    assert "exited" in run.engines.failures[serving] and run.states() == {0: "serving"}

    late = run.join()
    run.now += 61.0
    run.tick_until("it is not removed", lambda: late in run.services.removed)
    assert run.engines.failures[late] == "it is not up after 60 s"
    refuses = run.join()
    run.tell(
        refuses, state="waiting", detail="its file is too short", engine=EngineReport(url="http://h:9", version=-1)
    )
    run.tick_until("it is not seen", lambda: run.changes.stage(refuses) == "WEIGHT_SYNCING")
    run.changes.fail_late(refuses, "it did not serve within timeout_secs=20")
    assert run.engines.failures[refuses] == "it did not serve within timeout_secs=20: its file is too short"

    refused = run.join()
    run.tell(refused, state="failed", detail="its weights do not fit", error="…")
    run.tick_until("it is not removed", lambda: refused in run.services.removed)
    assert run.engines.failures[refused] == "its weights do not fit"
    run.difference = "it computes something else"
    other_engine = run.join()
    run.tell(other_engine, engine=EngineReport(url="http://h:2", version=4))
    run.tick_until("it is not removed", lambda: other_engine in run.services.removed)
    assert run.engines.failures[other_engine] == "it computes something else"

    given_up = run.join()
    run.changes.leave(given_up)
    run.tick_until("it is not removed", lambda: given_up in run.services.removed)
    assert given_up not in run.engines.failures and run.states() == {0: "serving"}
