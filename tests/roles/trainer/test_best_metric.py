"""The best evaluation, whose checkpoint is kept, and the end of a run that does not improve."""

from __future__ import annotations

from relax_core.roles.trainer.run_checkpoint import Best, BestMetric


def metric(*values: float, patience: int = 0, candidates: tuple[int, ...] = (10, 20, 30, 40)) -> BestMetric:
    """Returns a tracker after evaluations of versions 0, 10, 20 … with these values."""
    best = BestMetric("eval/exact", patience=patience, candidates=candidates, seen={})
    for place, value in enumerate(values):
        best.add(10 * place, {"exact": value, "reward": 9.0})
    return best


def test_the_first_of_the_highest_is_the_best() -> None:
    assert metric().best() is None
    assert metric(0.1, 0.5, 0.5, 0.2).best() == Best(version=10, value=0.5)
    assert metric(0.9, 0.5).best() == Best(version=0, value=0.9)


def test_what_is_still_to_be_judged_stays_and_what_was_passed_over_does_not() -> None:
    assert metric(0.1).kept() == {0, 10, 20, 30, 40}
    assert metric(0.1, 0.5, 0.2).kept() == {10, 30, 40}
    passed_over = metric(0.1)
    passed_over.add(30, {"exact": 0.05})  # a rollout that was restarted begins with the newest version
    assert passed_over.kept() == {0, 40}


def test_patience_counts_evaluations_since_the_best() -> None:
    assert not metric(0.5, 0.4, patience=2).exhausted()
    assert metric(0.5, 0.4, 0.5, patience=2).exhausted()
    assert not metric(0.5, 0.4, 0.6, patience=2).exhausted()
    assert not metric(0.5, *[0.1] * 50).exhausted()


def test_an_evaluation_that_is_told_twice_counts_once() -> None:
    best = metric(0.5, 0.4, patience=2)
    best.add(10, {"exact": 0.4})
    assert not best.exhausted()
    assert best.seen() == {0: 0.5, 10: 0.4}


def test_evaluations_before_a_resume_count() -> None:
    best = BestMetric("eval/exact", patience=3, candidates=[30], seen={0: 0.2, 10: 0.7, 20: 0.6})
    best.add(20, {"exact": 0.6})
    best.add(30, {"exact": 0.1})
    assert best.best() == Best(version=10, value=0.7)
    assert not best.exhausted() and best.kept() == {10}
