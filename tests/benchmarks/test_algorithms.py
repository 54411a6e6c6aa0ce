"""The figures of the algorithms' table."""

from __future__ import annotations

from benchmarks.algorithms import BEGIN, DOCS, END, run_figures, steps_to, table


def test_steps_to_is_the_first_window_that_is_good_enough() -> None:
    values = [0.0] * 10 + [1.0] * 10
    assert steps_to(0.9, values) == 19  # one 0 and nine 1 among the last ten
    assert steps_to(0.9, [1.0] * 10) == 10
    assert steps_to(0.9, [1.0] * 9) is None
    assert steps_to(0.9, [0.89] * 50) is None


def test_figures_and_table() -> None:
    actor = [
        {"reward": 0.5 if step < 15 else 1.0, "exact": 1.0, "algorithm/clip_low": 0.1, "algorithm/clip_high": 0.2}
        for step in range(30)
    ]
    figures = run_figures(actor, [{"exact": 0.25}, {"exact": 0.75}], {"ledger": {"issued": 30, "trained": 20}})
    unsolved = {name: value for name, value in figures.items() if name != "steps"}
    assert abs(figures["cut"] - 0.3) < 1e-9
    text = table({"grpo": [figures, unsolved]}, steps=30, seeds=2, overrides=["optimizer.lr=1e-3"])
    assert "| grpo | 0.50 → 1.00 | 0.25 → 0.75 | 10, — | 30.0 % | 1.50 |" in text
    assert text.startswith("30 train steps of the demo, 2 seeds. With optimizer.lr=1e-3.")


def test_the_docs_have_a_place_for_the_table() -> None:
    text = DOCS.read_text()
    assert text.count(BEGIN) == text.count(END) == 1 and text.index(BEGIN) < text.index(END)
