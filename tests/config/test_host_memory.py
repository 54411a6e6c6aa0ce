from __future__ import annotations

from relax_core.observe.process_usage import available_bytes


def test_available_is_within_the_machine() -> None:
    import psutil

    assert 0 < available_bytes() <= psutil.virtual_memory().total
