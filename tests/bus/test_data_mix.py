"""Tests data.mix in the bus: shares of issued and trained samples, replacement of lost prompts, and resume."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.bus.replay_buffer import ReplayBuffer
from relax_core.config.modality import MixOrder
from relax_core.contracts.bus import Admission, LedgerCounts
from tests.bus.make_rows import for_actor, make_core, make_row

MIX = {"image": 0.2, "text": 0.55, "video": 0.25}
GROUPS = 8


class Rollout:
    """Simulates a rollout: prompts take random times, videos ten times as long, and some prompts are dropped."""

    def __init__(self, core: ReplayBuffer, rng: random.Random, *, lost: float) -> None:
        self._core, self._rng, self._lost = core, rng, lost
        self._order = MixOrder(MIX)
        self._open: list[tuple[int, Admission]] = []
        self.now = 0
        self.trained: list[Admission] = []
        self._issued: dict[int, Admission] = {}

    def modality(self, admission: Admission) -> str:
        return self._order.at(admission.data_index)[0]

    def step(self) -> None:
        """Advances until one train step is done."""
        core, step = self._core, self._core.version
        while core.version == step:
            self._admit()
            self._complete()
            lease = core.lease(for_actor(step, groups=GROUPS))
            if lease is not None:
                self.trained += [self._issued[row.index] for row in lease.rows]
                core.ack([lease.lease_id], step=step, dropped={})
            self.now += 1

    def _admit(self) -> None:
        for admission in self._core.admit(self._rng.choice((3, 100))):
            self._issued[admission.index] = admission
            self._core.name_modalities(
                {admission.index: self.modality(admission)}
            )  # with data.mix the prompt has this modality already
            slow = 10 if self.modality(admission) == "video" else 1
            self._open.append((self.now + slow * self._rng.randint(1, 3), admission))

    def _complete(self) -> None:
        waiting = []
        for at, admission in self._open:
            if at > self.now or admission.min_version > self._core.version:
                waiting.append((at, admission))
            elif not self._core.accepts(admission.group_uid):
                continue
            elif self._rng.random() < self._lost:
                self._core.drop(admission.group_uid, reason="reward_failed")
            else:
                self._core.put([make_row(admission, version=self._core.version)])
        self._open = waiting


def new_core(steps: int, **changes: object) -> ReplayBuffer:
    return make_core(mix=MIX, groups_per_step=GROUPS, total_steps=steps, **changes)


def shares(counts: LedgerCounts) -> dict[str, tuple[float, float]]:
    """Returns by modality the share of issued samples that have ended, and the share of trained samples."""
    ended = {name: modality.issued - modality.open for name, modality in counts.modalities.items()}
    trained = {name: modality.trained for name, modality in counts.modalities.items()}
    return {name: (ended[name] / sum(ended.values()), trained[name] / sum(trained.values())) for name in MIX}


@given(seed=st.integers(0, 1000), spare=st.integers(0, 8), staleness=st.integers(0, 2), keep=st.booleans())
@settings(max_examples=30, deadline=None)
def test_every_step_trains_the_shares_however_long_a_prompt_takes(
    seed: int, spare: int, staleness: int, keep: bool
) -> None:
    surplus = "keep" if keep and staleness else "drop"
    core = new_core(20, spare_groups=spare, max_staleness=staleness, surplus=surplus)
    rollout = Rollout(core, random.Random(seed), lost=0.0)
    for step in range(20):
        rollout.step()
        trained = Counter(map(rollout.modality, rollout.trained))
        assert trained == {name: count for name in MIX if (count := MixOrder(MIX).count(name, GROUPS * (step + 1)))}
    counts = core.progress().ledger
    assert counts.lost == 0 and counts.issued == sum(modality.issued for modality in counts.modalities.values())
    if surplus == "drop":
        for issued, of_trained in shares(counts).values():
            assert abs(issued - of_trained) <= 0.02


def test_without_a_mix_the_slow_modality_is_trained_less() -> None:
    """The control of the previous test: without data.mix the same rollout loses most videos."""
    core = make_core(groups_per_step=GROUPS, total_steps=40, spare_groups=4)
    rollout = Rollout(core, random.Random(1), lost=0.0)
    while not core.finished():
        rollout.step()
    issued, trained = shares(core.progress().ledger)["video"]
    assert abs(issued - MIX["video"]) <= 0.03 and trained < issued - 0.1


@given(seed=st.integers(0, 1000), stop=st.integers(0, 9), spare=st.sampled_from((0, 4)), staleness=st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_a_resume_trains_each_prompt_once_and_keeps_the_shares(
    seed: int, stop: int, spare: int, staleness: int
) -> None:
    changes = {"spare_groups": spare, "max_staleness": staleness}
    core = new_core(10, **changes)
    first = Rollout(core, random.Random(seed), lost=0.1)
    for _ in range(stop):
        first.step()
    snapshot, before = core.snapshot(), core.progress()
    resumed = new_core(10, **changes)
    resumed.restore(snapshot)
    assert resumed.progress().ledger == before.ledger
    assert resumed.snapshot() == snapshot
    second = Rollout(resumed, random.Random(seed + 1), lost=0.1)
    while not resumed.finished():
        second.step()
    drawn = [admission.data_index for admission in first.trained + second.trained]
    assert len(drawn) == 10 * GROUPS and len(set(drawn)) == len(drawn)
    counts = resumed.progress().ledger
    assert (counts.lost, counts.trained_twice, counts.trained) == (0, 0, 10 * GROUPS * 2)
    trained = Counter(map(second.modality, first.trained + second.trained))
    assert trained == {name: MixOrder(MIX).count(name, 10 * GROUPS) for name in MIX}
    # Each modality has issued its first prompts without a gap, and the ledger has the ends of these prompts' groups.
    for name, modality in counts.modalities.items():
        numbers = sorted(MixOrder(MIX).at(index)[1] for index in {*drawn} if MixOrder(MIX).at(index)[0] == name)
        assert numbers[-1] < modality.issued // 2


def test_a_lost_prompt_is_replaced_by_the_next_of_its_modality() -> None:
    core = new_core(5, max_staleness=0)
    order = MixOrder(MIX)
    admitted = core.admit(100)
    lost = next(admission for admission in admitted if order.at(admission.data_index)[0] == "video")
    core.drop(lost.group_uid, reason="bad_media:truncated")
    (again,) = core.admit(100)
    assert again.min_version == lost.min_version and again.index == len(admitted)
    modality, number = order.at(again.data_index)
    given_before = sum(order.at(admission.data_index)[0] == "video" for admission in admitted)
    assert (modality, number) == ("video", given_before)
    counts = core.progress().ledger.modalities["video"]
    assert counts.dropped == {"bad_media:truncated": 2} and counts.issued == 2 * (given_before + 1)


def test_a_group_that_ended_before_its_row_was_read_counts_when_it_is_named() -> None:
    core = make_core()
    first, second = core.admit(2)
    core.drop(first.group_uid, reason="over_sampled")
    assert core.progress().ledger.modalities == {}
    core.name_modalities({first.index: "video", second.index: "text"})
    core.name_modalities({first.index: "video"})
    counts = core.progress().ledger.modalities
    assert (counts["video"].issued, counts["video"].dropped) == (2, {"over_sampled": 2})
    assert (counts["text"].issued, counts["text"].open) == (2, 2)
    restored = make_core()
    restored.restore(core.snapshot())
    assert restored.progress().ledger == core.progress().ledger
