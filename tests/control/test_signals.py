from __future__ import annotations

import os
import signal

import pytest

from relax_core.contracts.stop_signals import STOP_SIGNALS
from relax_core.control.controller_process import StopSignals


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_asks_and_a_later_one_ends(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(one) for one in STOP_SIGNALS]
    monkeypatch.setattr("relax_core.control.controller_process.AGAIN_S", 3600.0)
    with StopSignals() as signals:
        assert signals.received is None
        signal.raise_signal(number)
        assert signals.received == number and signals.exit_code == 128 + number
        signal.raise_signal(signal.SIGTERM)  # the same stop
        assert not signals.again
        monkeypatch.setattr("relax_core.control.controller_process.AGAIN_S", -1.0)
        signal.raise_signal(signal.SIGTERM)
        assert signals.again and signals.received == number
    assert [signal.getsignal(one) for one in STOP_SIGNALS] == before


def test_another_signal_is_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert seen == [signal.SIGUSR1] and signals.received is None
    finally:
        signal.signal(signal.SIGUSR1, before)
