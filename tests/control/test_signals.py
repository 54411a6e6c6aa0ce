from __future__ import annotations

import os
import signal

import pytest

from relax_core.control.signals import StopSignals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_a_later_one_ends(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr("relax_core.control.signals.AGAIN_S", 3600.0)
    with StopSignals() as signals:
        assert not signals.requested() and signals.received is None
        signal.raise_signal(number)
        assert signals.requested() and signals.received == number
        signal.raise_signal(signal.SIGTERM)  # the same stop: each process of a tree was sent one
        monkeypatch.setattr("relax_core.control.signals.AGAIN_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert signals.received == number
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


def test_another_signal_is_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert seen == [signal.SIGUSR1] and not signals.requested()
    finally:
        signal.signal(signal.SIGUSR1, before)
