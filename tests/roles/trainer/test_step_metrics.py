"""Compares the trainer's record of a step with values computed by hand. Also tests the clock of a step's parts."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from statistics import pstdev

import msgspec
import numpy as np
import pytest

from relax_core.contracts import columns as c
from relax_core.contracts.bus import BusTimeout, Group, Lease
from relax_core.contracts.train import StepMetrics
from relax_core.roles.trainer.policy_trainer import StepClock, StepGroups, real_histogram, step_values
from relax_core.train.micro_batches import StepResult, UpdateMetrics, decode_train_tree
from tests.observe.metrics_page import not_described
from tests.trees import answers_tree


def lease_after(seconds: float, *, waited_s: float) -> Lease:
    """Returns a bus call that takes ``seconds``. During ``waited_s`` of this time it waits for groups."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
    return Lease(lease_id=1, task="actor", rows=[], waited_s=waited_s)


def test_what_a_call_waited_for_rows_is_told_apart() -> None:
    clock = StepClock()
    began = time.perf_counter()
    clock.timed_lease(lambda: lease_after(0.03, waited_s=0.02), timeout_s=1.0)
    assert clock.timed_lease(lambda: None, timeout_s=1.0) is None  # an ack without a request for the next lease
    took_ms = 1e3 * (time.perf_counter() - began)
    assert clock.wait_ms == pytest.approx(20.0)
    assert clock.bus_ms >= 10.0 - 1e-6
    assert clock.wait_ms + clock.bus_ms <= took_ms


def test_a_call_past_its_deadline_has_waited_for_all_of_it() -> None:
    clock = StepClock()

    def no_rows() -> Lease:
        lease_after(0.02, waited_s=0.0)
        raise BusTimeout("rollout owes them")

    for _ in range(2):
        with pytest.raises(BusTimeout):
            clock.timed_lease(no_rows, timeout_s=0.015)
    assert clock.wait_ms == pytest.approx(30.0)
    assert clock.bus_ms >= 10.0 - 1e-6


def test_parts_add_up_over_calls() -> None:
    clock = StepClock()
    for _ in range(3):
        with clock.timed("train_ms"):
            pass
    once = clock.train_ms
    with clock.timed("train_ms"):
        lease_after(0.01, waited_s=0.0)
    assert clock.train_ms >= once + 10.0 - 1e-6
    assert (clock.sync_ms, clock.bus_ms) == (0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Answer:
    """Defines an answer. Its first ``untrained`` tokens are masked."""

    reward: float
    tokens: int
    version: int
    finish: str = "stop"
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    logprob: float = -1.0
    untrained: int = 0


def row(*samples: Answer) -> Group:
    lengths = [sample.tokens for sample in samples]

    def by_token(values: Sequence[float]) -> np.ndarray:
        return np.repeat(np.array(values), lengths)

    tree = answers_tree(
        "g",
        [1],
        lengths,
        np.ones(sum(lengths)),
        logprobs=by_token([sample.logprob for sample in samples]),
        loss_mask=[token >= sample.untrained for sample in samples for token in range(sample.tokens)],
        versions=by_token([sample.version for sample in samples]),
        rewards=[sample.reward for sample in samples],
        advantages=np.zeros(sum(lengths), dtype=np.float32),
    )
    episodes = [
        msgspec.structs.replace(episode, parts=sample.parts, ended=sample.finish)
        for episode, sample in zip(tree.episodes, samples, strict=True)
    ]
    columns = c.encode_tree(dataclasses.replace(tree, episodes=episodes))
    uids, versions = [episode.uid for episode in tree.episodes], [sample.version for sample in samples]
    return Group(group_uid="g", index=0, uids=uids, versions=versions, columns=columns)


def step_rows(rows: Sequence[Group]) -> StepGroups:
    groups = [decode_train_tree(row, step=10, oldest_version=0)[0] for row in rows]
    return StepGroups(leased=list(rows), groups=groups, lease_ids=[1])


ROWS = step_rows(
    [
        row(
            Answer(1.0, 4, 9, parts={"exact": 1.0, "format": 0.5}, logprob=-0.5),
            Answer(0.0, 8, 9, finish="length", parts={"exact": 0.0, "format": 0.25}, logprob=-2.0, untrained=6),
        ),
        row(  # no signal: all rewards are equal
            Answer(0.5, 3, 8, parts={"exact": 0.0}),
            Answer(0.5, 1, 7, parts={"exact": 0.0}),
            Answer(0.5, 2, 10, parts={"exact": 0.0}),
        ),
    ]
)


def test_figures_are_over_samples_not_over_groups() -> None:
    assert ROWS.values(step=10) == pytest.approx(
        {
            "reward": (1.0 + 0.0 + 3 * 0.5) / 5,
            "reward/std": math.sqrt(2 * 0.25 / 5),
            "reward/min": 0.0,
            "reward/max": 1.0,
            "groups_without_signal": 1 / 2,
            "exact": 1 / 5,
            "reward_format": (0.5 + 0.25) / 2,  # over the samples with this part
            "response_tokens": (4 + 8 + 3 + 1 + 2) / 5,
            "response_tokens/min": 1.0,
            "response_tokens/p10": 1.0,
            "response_tokens/p50": 3.0,
            "response_tokens/p90": 8.0,
            "response_tokens/max": 8.0,
            "truncated": 1 / 5,
            "entropy": (4 * 0.5 + 2 * 2.0 + 6 * 1.0) / 12,  # over the trained tokens
            "staleness_max": 3.0,
            "staleness_mean": (1 + 1 + 2 + 3 + 0) / 5,
        }
    )


def test_lengths_are_told_as_a_histogram() -> None:
    """Every length is in one bin. The limits are equidistant and end with the largest length."""
    histogram = ROWS.histograms(step=10)[0]
    assert (histogram.source, histogram.name, histogram.step) == ("actor", "response_tokens", 10)
    assert dict(zip(histogram.limits, histogram.counts, strict=True)) == {
        1: 1,
        2: 1,
        3: 1,
        4: 1,
        5: 0,
        6: 0,
        7: 0,
        8: 1,
    }
    assert (histogram.least, histogram.largest, histogram.total, histogram.total_of_squares) == (1, 8, 18, 94)
    random = np.random.default_rng(0)
    for lengths in ([7], [3, 3, 3], random.integers(1, 5000, 300), random.integers(5, 25, 40), [1, 100_000]):
        of_lengths = step_rows([row(*(Answer(0.0, int(length), 9, parts={}) for length in lengths))]).histograms(
            step=9
        )[0]
        edges = [-math.inf, *of_lengths.limits]
        expected = [sum(low < n <= high for n in lengths) for low, high in zip(edges, of_lengths.limits, strict=False)]
        assert of_lengths.counts == expected and sum(of_lengths.counts) == len(lengths)
        assert len(of_lengths.limits) <= 20 and of_lengths.limits[-1] >= max(lengths)
        assert len(set(np.diff(of_lengths.limits))) <= 1


def test_staleness_rewards_and_advantages_are_told_as_histograms() -> None:
    found = {histogram.name: histogram for histogram in ROWS.histograms(step=10)}
    assert dict(zip(found["staleness"].limits, found["staleness"].counts, strict=True)) == {0: 1, 1: 2, 2: 1, 3: 1}
    rewards = np.concatenate([[episode.reward for episode in group.episodes] for group in ROWS.groups])
    assert sum(found["reward"].counts) == len(rewards)
    assert (found["reward"].least, found["reward"].largest) == (rewards.min(), rewards.max())
    assert found["reward"].limits[-1] == rewards.max() and len(found["reward"].limits) == 20
    equal = found["advantage"]
    assert (equal.limits, equal.counts, equal.total) == ([0.0], [5], 0.0)
    several = real_histogram("x", np.array([0.5, 2.0, 1.0, 2.0]), step=1)
    assert [count for count in several.counts if count] == [1, 1, 2]
    assert several.limits[0] == pytest.approx(0.5 + 1.5 / 20)


def test_quantiles_are_lengths_that_some_answer_has() -> None:
    lengths = [int(n) for n in np.random.default_rng(1).integers(1, 1000, 97)]
    values = step_rows([row(*(Answer(float(n % 7), n, 9, parts={}) for n in lengths))]).values(step=10)
    for share in (10, 50, 90):
        found = values[f"response_tokens/p{share}"]
        assert found in lengths
        assert sum(n <= found for n in lengths) / 97 >= share / 100 > sum(n < found for n in lengths) / 97
    assert values["reward/std"] == pytest.approx(pstdev(n % 7 for n in lengths), rel=1e-5)


METRICS = StepMetrics(
    loss=-0.5,
    grad_norm=2.0,
    learning_rate=1e-3,
    tokens=18,
    samples=5,
    logprob_gap_max=1e-6,
    logprob_gap_mean=1e-7,
    logprob_gap_tokens=2,
    algorithm={"kl": 0.1},
    timings_ms={"pack": 3.0},
)


def test_groups_of_one_sample_say_nothing_of_their_signal() -> None:
    alone = step_rows([row(Answer(1.0, 4, 9, parts={})), row(Answer(0.5, 4, 9, parts={}))])
    assert "groups_without_signal" not in alone.values(step=9)


def test_where_no_token_was_compared_there_is_no_gap() -> None:
    stale = dataclasses.replace(METRICS, logprob_gap_max=0.0, logprob_gap_mean=0.0, logprob_gap_tokens=0)
    result = StepResult(metrics=UpdateMetrics(policy=stale), updates=1)
    values = step_values(ROWS, result, StepClock(), step=10, step_ms=48.0)
    assert {name: value for name, value in values.items() if name.startswith("logprob_gap")} == {
        "logprob_gap_tokens": 0
    }


def test_the_critics_figures_have_their_own_prefix() -> None:
    # returns 1 and 3 (mean square 5, variance 1), errors 0.5 and -0.5: a quarter of the variance remains
    moments = {"return": 2.0, "return_squared": 5.0, "error": 0.0, "error_squared": 0.25}
    critic = dataclasses.replace(METRICS, loss=0.7, grad_norm=3.0, algorithm={"clip": 0.1, **moments})
    result = StepResult(metrics=UpdateMetrics(policy=METRICS, critic=critic), updates=4)
    values = step_values(ROWS, result, StepClock(), step=10, step_ms=48.0)
    assert {name: value for name, value in values.items() if name.startswith("value/")} == {
        "value/loss": 0.7,
        "value/grad_norm": 3.0,
        "value/clip": 0.1,
        "value/return": 2.0,
        "value/explained_variance": 0.75,
    }
    assert (values["loss"], values["updates"]) == (-0.5, 4)
    equal = dataclasses.replace(
        critic, algorithm={"return": 2.0, "return_squared": 4.0, "error": 1.0, "error_squared": 1.0}
    )
    result = StepResult(metrics=UpdateMetrics(policy=METRICS, critic=equal), updates=4)
    assert "value/explained_variance" not in step_values(ROWS, result, StepClock(), step=10, step_ms=48.0)


def test_the_page_of_metrics_describes_a_mixture_and_a_critic() -> None:
    moe = dict.fromkeys(("max_load", "min_load", "entropy", "balance_loss"), 1.0)
    moments = {"return": 2.0, "return_squared": 5.0, "error": 0.0, "error_squared": 0.25}
    policy = dataclasses.replace(METRICS, moe=moe)
    critic = dataclasses.replace(METRICS, algorithm={"clip": 0.1, **moments})
    result = StepResult(metrics=UpdateMetrics(policy=policy, critic=critic), updates=1)
    values = step_values(ROWS, result, StepClock(), step=10, step_ms=48.0)
    assert not_described(f"actor/{name}" for name in values) == set()
    assert not_described(["actor/rewards", "actor/value/unheard_of", "ledger/stale"]) == {
        "actor/rewards",
        "actor/value/unheard_of",
        "ledger/stale",
    }


def test_a_record_holds_metrics_clock_and_prefixed_names() -> None:
    clock = StepClock(wait_ms=1.0, bus_ms=1.5, decode_ms=2.0, train_ms=30.0, sync_ms=4.0)
    clock.push_ms, clock.checkpoint_ms = 5.0, 6.0
    result = StepResult(metrics=UpdateMetrics(policy=METRICS), updates=1)
    values = step_values(ROWS, result, clock, step=10, step_ms=48.0)
    assert values.items() >= ROWS.values(step=10).items()
    told = {"loss": -0.5, "grad_norm": 2.0, "learning_rate": 1e-3, "tokens": 18, "samples": 5}
    gaps = {"logprob_gap_max": 1e-6, "logprob_gap_mean": 1e-7, "logprob_gap_tokens": 2}
    waited = {"step_ms": 48.0, "wait_ms": 1.0, "bus_ms": 1.5, "push_ms": 5.0}
    rates = {"samples_per_s": pytest.approx(5 / 0.048), "tokens_per_s": pytest.approx(18 / 0.048)}
    assert {name: values[name] for name in rates} == rates
    worked = {"decode_ms": 2.0, "train_ms": 30.0, "checkpoint_ms": 6.0}
    assert values.items() >= (told | gaps | waited | worked).items()
    assert values["sync_ms"] == 4.0 and not any(name.startswith("value/") for name in values)
    assert (values["algorithm/kl"], values["train/pack"]) == (0.1, 3.0)
