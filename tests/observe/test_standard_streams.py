"""Tests standard streams without a reader, on real pipes. test_unread_output.py covers supervised runs."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Iterator

import pytest

from relax_core.observe.standard_streams import UnreadFile, unread_streams

DEADLINE_S = 120.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Yields the read end and the write end of a pipe. A test may close the read end."""
    ends = os.pipe()
    yield ends
    os.close(ends[1])


def test_without_a_reader_all_is_taken_and_goes_nowhere(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    file = UnreadFile(writer, "<stdout>", timeout_s=None)
    os.close(reader)
    assert file.write(b"x" * 100_000) == 100_000
    assert os.fstat(writer).st_rdev == os.stat(os.devnull).st_rdev, "other writers get no broken pipe, either"
    assert file.write(b"more") == 4


def test_a_reader_that_stops_reading_misses_output_and_learns_how_much(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    file = UnreadFile(writer, "<stdout>", timeout_s=0.05)
    for _ in range(100):
        assert file.write(b"x" * 4096) == 4096
    assert file.write(b"lost\n") == 5
    kept = read_all(reader)
    assert kept == b"x" * len(kept)
    file.write(b"back\n")
    left_out = 100 * 4096 + 5 - len(kept)
    assert (
        read_all(reader).decode()
        == f"relax: {left_out} bytes of output are left out here, because they were not read\nback\n"
    )
    os.close(reader)


def test_a_slow_reader_that_is_waited_for_gets_everything(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    data, got = os.urandom(1_000_000), bytearray()

    def read() -> None:
        while len(got) < len(data):
            got.extend(os.read(reader, 1000))

    thread = threading.Thread(target=read)
    thread.start()
    assert UnreadFile(writer, "<stdout>", timeout_s=None).write(data) == len(data)
    thread.join(DEADLINE_S)
    os.close(reader)
    assert got == data


def test_a_stream_that_somebody_put_there_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with unread_streams():
        print("said")
        print("meant", file=sys.stderr)
    assert capsys.readouterr() == ("said\n", "meant\n")


def read_all(descriptor: int) -> bytes:
    """Returns the current content of the pipe."""
    found = b""
    while select.select([descriptor], [], [], 0)[0]:
        found += os.read(descriptor, 1 << 16)
    return found
