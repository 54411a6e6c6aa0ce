from __future__ import annotations

from relax_core.rollout.prompt_tokens import sampling_seed


def test_a_seed_belongs_to_run_index_and_purpose() -> None:
    seeds = {
        sampling_seed(run, index=index, purpose=purpose)
        for run in range(20)
        for index in range(50)
        for purpose in ("train", "eval")
    }
    assert len(seeds) == 20 * 50 * 2
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_is_the_same_in_every_version() -> None:
    """The seed is `printf 'train:7:3' | b2sum -l 64`, little-endian, halved. Resumed runs depend on its value."""
    assert sampling_seed(7, index=3) == 8178726636433246004
