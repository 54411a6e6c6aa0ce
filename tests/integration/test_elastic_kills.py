"""Tests kills while an engine joins or leaves: the order ends with a reason, and no sample is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration.elastic_run import JOINING, OVERRIDES, ElasticRun
from tests.integration.live_run import LiveRun

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

KILLS = (
    *OVERRIDES,
    "run.save_every=5",
    "run.max_restarts=20",
    "run.max_recoveries=20",
)
# Kills each process once while an engine joins or leaves. Recoveries are in place or from a checkpoint.
SOME = [
    ("gateway", "CREATING"),
    ("rollout", "HEALTH_CHECKING"),
    ("owner", "WEIGHT_SYNCING"),
    ("trainer", "HEALTH_CHECKING"),
    ("newcomer", "DRAINING"),
    ("controller", "DRAINING"),
]
OTHERS = [
    ("owner", "CREATING"),
    ("newcomer", "HEALTH_CHECKING"),
    ("newcomer", "WEIGHT_SYNCING"),
    ("gateway", "DRAINING"),
    ("rollout", "DRAINING"),
    ("controller", "CREATING"),
    ("controller", "WEIGHT_SYNCING"),
    ("trainer", "DRAINING"),
]


@pytest.mark.parametrize("kills", [SOME, pytest.param(OTHERS, marks=pytest.mark.soak)], ids=["some", "others"])
def test_an_order_ends_whoever_is_killed(kills: Sequence[tuple[str, str]], tmp_path: Path) -> None:
    with LiveRun(tmp_path / "run", *KILLS) as live:
        live.wait_step(6)  # by then a checkpoint exists
        elastic = ElasticRun(live)
        for victim, state in kills:
            joining = state in JOINING
            killed = {"victim": victim, "state": state}
            out = elastic.order("scale_out", {"num_replicas": 2}, **killed if joining else {})
            assert out["status"] in (("ACTIVE", "FAILED") if joining else ("ACTIVE",)), (victim, state, out)
            assert len(elastic.engines()) == (2 if out["status"] == "ACTIVE" else 1), (victim, state, out)
            if out["status"] == "ACTIVE":
                gone = elastic.order("scale_in", {"num_replicas": 1}, **{} if joining else killed)
                assert gone["status"] in ("COMPLETED", "NOOP"), (victim, state, gone)
            elastic.wait_alone()
        step = elastic.ask("GET", "/run")["step"]
        live.wait_step(step + 2)
        run = elastic.stop()
    assert "the controller was killed by SIGKILL; another goes on from step" in run.output
    ids = [engine["id"] for engine in run.summary["engines"]]
    assert ids == sorted(set(ids), key=lambda name: int(name.partition("-")[2])), "no number is used twice"
    for engine in run.summary["engines"][1:]:
        assert engine["state"] == "left" or (engine["state"] == "failed" and engine["last_failure"]), engine
