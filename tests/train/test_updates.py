"""Compares several updates in one train step with the same updates in separate steps."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_model
from tiny_trainer import make_backend, make_critic, make_groups, train_step

from relax_core.contracts.core_wait import core_wait_s
from relax_core.contracts.train import StepMetrics
from relax_core.contracts.tree import TokenTree
from relax_core.train.micro_batches import (
    RankClock,
    StepResult,
    StepUpdates,
    UpdateMetrics,
    UpdatePlan,
    over_updates,
    times_of_step,
)


def work(seconds: float) -> None:
    """Computes until this thread has used this much processor time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_wall_and_processor_time_are_apart() -> None:
    clock = RankClock()
    for _ in range(2):
        with clock.timed("forward"):
            work(0.02)
        with clock.timed("reduce"):
            time.sleep(0.03)
        clock.add_rows(5)
    times = clock.times()
    assert times.rows == 10 and times.began_s <= times.ended_s <= time.time()
    assert times.wall_ms["forward"] >= times.cpu_ms["forward"] >= 40.0
    assert times.wall_ms["reduce"] >= 60.0 and times.cpu_ms["reduce"] < 30.0
    assert 0.0 <= times.core_wait_ms <= times.wall_ms["forward"], "a wait for other ranks is not counted"
    whole = times_of_step([times, times])
    assert whole.wall_ms["forward"] == 2 * times.wall_ms["forward"] and whole.rows == 20
    assert (whole.began_s, whole.ended_s) == (times.began_s, times.ended_s)


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="this kernel does not tell it")
def test_threads_that_share_one_core_wait_for_it() -> None:
    waited: list[tuple[float, float]] = []
    core = min(os.sched_getaffinity(0))

    def compete() -> None:
        os.sched_setaffinity(0, {core})
        before, began = core_wait_s(), time.perf_counter()
        for _ in range(40):  # while a thread holds the GIL, the other threads are not ready
            sum(bytes(2**20))
            os.urandom(2**22)
        waited.append((core_wait_s() - before, time.perf_counter() - began))

    threads = [threading.Thread(target=compete) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    assert len(waited) == 3 and all(0.0 < wait <= took for wait, took in waited)
    before = core_wait_s()
    time.sleep(0.2)
    assert core_wait_s() - before < 0.19, "a sleeping thread is not ready to run"


GROUPS = make_groups(
    [[5, 1, 8], [7, 2], [3, 3, 3, 3], [9], [4, 4], [6, 1]], prompt_lengths=[9, 4, 12, 6, 5, 5], masked=0.2
)
BUDGET = 30  # token rows of a micro-batch: one or two groups


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path


class Together:
    """Trains a policy, and optionally a critic, in one process."""

    def __init__(self, policy: Any, critic: Any | None = None) -> None:
        self.policy, self.critic = policy, critic
        self.batches: list[list[str]] = []  # group uids of each micro-batch
        self.updates: list[list[str]] = []  # group uids of each update

    def begin_step(self, step: int) -> None:
        self._under_way: list[str] = []
        for backend in filter(None, (self.policy, self.critic)):
            backend.begin_step(step)

    def accumulate(self, groups: Sequence[TokenTree]) -> None:
        if groups:
            self.batches.append([group.group_uid for group in groups])
        self._under_way += [group.group_uid for group in groups]
        for backend in filter(None, (self.policy, self.critic)):
            backend.accumulate(groups)

    def count(self, groups: Sequence[TokenTree]) -> None:
        self._under_way += [group.group_uid for group in groups]
        self.policy.count(groups)

    def finish_step(self) -> UpdateMetrics:
        self.updates.append(self._under_way)
        critic = None if self.critic is None else self.critic.finish_step()
        return UpdateMetrics(policy=self.policy.finish_step(), critic=critic)


def run(
    trainer: Together,
    groups: list[TokenTree] = GROUPS,
    *,
    mini_batches: int = 1,
    epochs: int = 1,
    pieces: Sequence[int] = (6,),
    step: int = 3,
    seed: int = 0,
    skips: bool = False,
) -> StepResult:
    """Runs a step. ``pieces`` are the numbers of groups that arrive together."""
    plan = UpdatePlan(
        groups=len(groups),
        mini_batches=mini_batches,
        epochs=epochs,
        budget_tokens=BUDGET,
        ranks=1,
        seed=seed,
        skips=skips,
    )
    updates = StepUpdates(trainer, plan, step=step)
    start = 0
    for piece in pieces:
        updates.add(groups[start : start + piece])
        start += piece
    return updates.finish()


def weights(backend: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.export()}


def assert_same_bits(ours: Any, theirs: Any) -> None:
    expected = weights(theirs)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in ours.export())


def uids(places: Sequence[int]) -> list[str]:
    return [f"g{place}" for place in places]


def test_one_update_is_the_plain_step_to_the_bit(folder: Path) -> None:
    trainer, plain = Together(make_backend(folder)), make_backend(folder)
    result = run(trainer, pieces=(1, 3, 2))
    by_uid = {group.group_uid: group for group in GROUPS}
    expected = train_step(plain, [[by_uid[uid] for uid in batch] for batch in trainer.batches], step=3)
    assert result.updates == 1 and len(trainer.batches) > 2
    assert dataclasses.replace(result.metrics.policy, timings_ms={}) == dataclasses.replace(expected, timings_ms={})
    assert_same_bits(trainer.policy, plain)


def test_mini_batches_are_parts_in_order_of_arrival(folder: Path) -> None:
    trainer, plain = Together(make_backend(folder)), make_backend(folder)
    result = run(trainer, mini_batches=3, pieces=(3, 3))
    assert trainer.updates == [uids([0, 1]), uids([2, 3]), uids([4, 5])] and result.updates == 3
    by_uid = {group.group_uid: group for group in GROUPS}
    for update in trainer.updates:
        batches = [[by_uid[uid] for uid in batch] for batch in trainer.batches if set(batch) <= set(update)]
        train_step(plain, batches, step=3)
    assert_same_bits(trainer.policy, plain)


def test_it_tells_when_the_weights_are_between_two_steps(folder: Path) -> None:
    """A stop request may end a step only before the step's first update."""
    trainer = Together(make_backend(folder))
    plan = UpdatePlan(groups=len(GROUPS), mini_batches=3, epochs=1, budget_tokens=BUDGET, ranks=1, seed=0)
    updates = StepUpdates(trainer, plan, step=0)
    made = []
    for group in GROUPS:
        updates.add([group])
        made.append(updates.made)
    assert made == [0, 1, 1, 2, 2, 3]


def test_later_epochs_are_shuffled_by_seed_step_and_epoch(folder: Path) -> None:
    trainer = Together(make_backend(folder))
    result = run(trainer, mini_batches=2, epochs=3)
    assert result.updates == 6 and trainer.updates[:2] == [uids([0, 1, 2]), uids([3, 4, 5])]
    for epoch in (1, 2):
        order = np.random.default_rng((0, 3, epoch)).permutation(6).tolist()
        assert trainer.updates[2 * epoch] + trainer.updates[2 * epoch + 1] == uids(order)
    assert trainer.updates[2:4] != trainer.updates[4:6]
    again, other_step, other_seed = (Together(make_backend(folder)) for _ in range(3))
    run(again, mini_batches=2, epochs=3, pieces=(2, 1, 3))
    run(other_step, mini_batches=2, epochs=3, step=4)
    run(other_seed, mini_batches=2, epochs=3, seed=1)
    assert again.updates == trainer.updates
    assert_same_bits(again.policy, trainer.policy)
    assert trainer.updates[2:] not in (other_step.updates[2:], other_seed.updates[2:])


def test_the_ratio_is_against_the_batchs_own_log_probs(folder: Path) -> None:
    """The first update is on-policy and has ratio 1. The second update's ratio shows the change by the first update."""
    backend = make_backend(folder, optimizer={"lr": 1e-2})
    logprobs = backend.logprobs(GROUPS)
    groups = [dataclasses.replace(g, logprobs=own) for g, own in zip(GROUPS, logprobs, strict=True)]
    seen: list[float] = []

    class Watched(Together):
        def finish_step(self) -> UpdateMetrics:
            metrics = super().finish_step()
            seen.append(metrics.policy.algorithm["ratio"])
            return metrics

    result = run(Watched(backend), groups, epochs=2)
    assert seen[0] == pytest.approx(1.0, abs=1e-6) and abs(seen[1] - 1.0) > 1e-3
    assert result.metrics.policy.algorithm["ratio"] == pytest.approx((seen[0] + seen[1]) / 2)
    # The engine's log-probs belong to the weights before the first update, so only this update is compared with them.
    assert result.metrics.policy.logprob_gap_max < 1e-5


def masked(group: TokenTree) -> TokenTree:
    return dataclasses.replace(group, loss_mask=np.zeros(group.rows, dtype=bool))


def test_a_mini_batch_without_a_trained_token_moves_nothing(folder: Path) -> None:
    """Adam's non-zero momentum does not move the weights, either."""
    groups = [*GROUPS[:2], masked(GROUPS[2]), masked(GROUPS[3]), *GROUPS[4:]]
    trainer, plain = Together(make_backend(folder)), make_backend(folder)
    for step in (0, 1):
        result = run(trainer, groups, mini_batches=3, step=step)
        for part in (groups[:2], groups[4:]):
            batches = [part] if sum(group.computed_rows for group in part) <= BUDGET else [[group] for group in part]
            train_step(plain, batches, step=step)
    assert result.updates == 2
    assert result.metrics.policy.tokens == sum(int(group.loss_mask.sum()) for group in groups)
    assert_same_bits(trainer.policy, plain)


def test_a_step_without_a_trained_token_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="train step 3: every token is masked"):
        run(Together(make_backend(folder)), [masked(group) for group in GROUPS], mini_batches=2, epochs=2)


def without_advantage(group: TokenTree) -> TokenTree:
    return group.with_extras(advantages=np.zeros(len(group.tokens[0]), dtype=np.float32))


def assert_close(ours: Any, theirs: Any) -> None:
    expected = weights(theirs)
    for name, tensor in ours.export():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


def test_groups_without_advantage_are_counted_and_not_computed(folder: Path) -> None:
    """The gradient is the same sum over the same denominator. A small epsilon of Adam would enlarge rounding errors."""
    groups = [without_advantage(group) if index in (1, 2, 4) else group for index, group in enumerate(GROUPS)]
    trainer, whole = (Together(make_backend(folder, optimizer={"eps": 1e-3})) for _ in range(2))
    found, expected = run(trainer, groups, skips=True, pieces=(2, 4)), run(whole, groups, pieces=(6,))
    ours, theirs = found.metrics.policy, expected.metrics.policy
    assert [uid for batch in trainer.batches for uid in batch] == uids([0, 3, 5])
    assert (ours.tokens, ours.samples) == (theirs.tokens, theirs.samples)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
    assert (found.skipped_groups, found.skipped_rows) == (3, sum(groups[i].computed_rows for i in (1, 2, 4)))
    assert ours.rows == theirs.rows - found.skipped_rows and expected.skipped_groups == 0
    assert_close(trainer.policy, whole.policy)


def test_an_update_without_any_advantage_computes_one_group(folder: Path) -> None:
    """Adam's momentum moves the weights as if all groups were computed. The computed group has unmasked tokens."""
    groups = [masked(GROUPS[0]), *map(without_advantage, GROUPS[1:3]), *GROUPS[3:]]
    trainer, whole = (Together(make_backend(folder, optimizer={"eps": 1e-3})) for _ in range(2))
    for step in (0, 1):
        found = run(trainer, groups, mini_batches=2, epochs=2, step=step, skips=True)
        run(whole, groups, mini_batches=2, epochs=2, step=step)
    assert trainer.batches[0] == uids([1]) and found.skipped_groups == 2 and found.updates == 4
    assert_close(trainer.policy, whole.policy)


def test_the_critic_makes_the_same_updates(folder: Path) -> None:
    trainer = Together(make_backend(folder), make_critic(folder))
    result = run(trainer, mini_batches=2, epochs=2)
    critic = result.metrics.critic
    assert critic is not None and critic.tokens == result.metrics.policy.tokens
    alone = Together(make_critic(folder))
    of_alone = run(alone, mini_batches=2, epochs=2).metrics.policy
    assert dataclasses.replace(critic, timings_ms={}) == dataclasses.replace(of_alone, timings_ms={})


def test_metrics_over_updates_by_hand() -> None:
    def update(loss: float, tokens: int, gap: float, **algorithm: float) -> StepMetrics:
        return StepMetrics(
            loss=loss,
            grad_norm=2 * loss,
            learning_rate=0.1,
            tokens=tokens,
            samples=tokens // 2,
            logprob_gap_max=gap,
            logprob_gap_mean=gap / 2,
            logprob_gap_tokens=tokens,
            algorithm=algorithm,
            algorithm_counts=dict.fromkeys(algorithm, float(tokens)),
            timings_ms={"forward": 1.0},
        )

    got = over_updates([update(1.0, 10, 0.1, a=1.0), update(2.0, 30, 0.5, a=3.0, b=5.0)], first_epoch=1)
    assert (got.loss, got.grad_norm, got.tokens, got.samples) == (1.5, 3.0, 10, 5)
    assert (got.logprob_gap_max, got.logprob_gap_mean, got.logprob_gap_tokens) == (0.1, 0.05, 10)
    assert got.algorithm == {"a": 2.5, "b": 5.0} and got.timings_ms == {"forward": 2.0}


def test_metrics_over_updates_weigh_what_was_computed_and_not_what_was_skipped() -> None:
    """Each update has 100 trained tokens. The first update computes one token, the second update all but one token."""
    values = [Fraction(1, 2)], [Fraction(0)] * 99
    updates = [
        StepMetrics(
            loss=0.0,
            grad_norm=0.0,
            learning_rate=0.1,
            tokens=100,
            samples=10,
            logprob_gap_max=0.0,
            logprob_gap_mean=0.0,
            logprob_gap_tokens=0,
            algorithm={"clip_low": float(sum(computed) / len(computed))},
            algorithm_counts={"clip_low": float(len(computed))},
            moe={"max_load": load},
            rows=len(computed),
        )
        for computed, load in zip(values, (4.0, 1.0), strict=True)
    ]
    got = over_updates(updates, first_epoch=2)
    whole = sum(sum(computed) for computed in values) / sum(len(computed) for computed in values)
    assert whole == Fraction(1, 200) and got.algorithm == {"clip_low": float(whole)}
    assert got.algorithm_counts == {"clip_low": 100.0} and got.tokens == 200
    assert got.moe == {"max_load": pytest.approx((4 * 1 + 1 * 99) / 100)}
