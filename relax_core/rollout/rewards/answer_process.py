"""Scores the answers of one call in a separate process, for rewards that evaluate answers as programs.

A program in an answer can change the process that evaluates the answer. Therefore each call gets a new process. The
process closes the worker's pipe to the run, and it cannot create files or processes.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import resource
import signal
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec

from relax_core.contracts.child_process import OwnerPipe
from relax_core.contracts.reward import RewardOutput
from relax_core.sandbox.seccomp_filter import answer_filter

_MAX_BYTES = 1 << 20  # limit of the bytes that are read from the child
_READ_BYTES = 1 << 16
_SET_SECCOMP, _FILTER = 22, 2  # prctl's PR_SET_SECCOMP and SECCOMP_MODE_FILTER
_LIMITS = {resource.RLIMIT_NOFILE: 64, resource.RLIMIT_SIGPENDING: 64, resource.RLIMIT_CORE: 0}


class _Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("lines", ctypes.c_char_p)]  # struct sock_fprog


def scored_alone(
    score: Callable[[], Sequence[RewardOutput]], pipe: OwnerPipe, *, answers: int, memory_bytes: int
) -> list[RewardOutput]:
    """Returns the outputs for ``answers`` answers; ``score`` runs in a child process.

    The child has at most ``memory_bytes`` of private memory. The answers have no reward if the child dies, or if its
    result is not a list of outputs with finite numbers.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _score_and_exit(score, pipe, writer, memory_bytes)
    os.close(writer)
    try:
        said = _read(reader)
    finally:
        os.close(reader)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return [RewardOutput(reward=None, reason=f"the process of the answer died ({how})", cause="died")] * answers
    try:
        outputs = msgspec.msgpack.decode(said, type=list[RewardOutput])
    except msgspec.DecodeError:
        outputs = []
    if len(outputs) != answers or not all(_is_finite(output) for output in outputs):
        return [RewardOutput(reward=None, reason="the process of the answer gave no output", cause="died")] * answers
    return outputs


def _score_and_exit(
    score: Callable[[], Sequence[RewardOutput]], pipe: OwnerPipe, writer: int, memory_bytes: int
) -> NoReturn:
    code = 1
    try:
        pipe.leave()
        for kind, most in (*_LIMITS.items(), (resource.RLIMIT_DATA, memory_bytes)):
            _, hard = resource.getrlimit(kind)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))
        _add_filter(answer_filter())
        rest = memoryview(msgspec.msgpack.encode(score()))
        while rest:
            rest = rest[os.write(writer, rest) :]
        code = 0
    except BaseException:  # the child must not return to the worker's code
        traceback.print_exc()
    finally:
        os._exit(code)


def _is_finite(output: RewardOutput) -> bool:
    numbers = [*(output.parts or {}).values(), 0.0 if output.reward is None else output.reward]
    return all(math.isfinite(number) for number in numbers)


def _add_filter(lines: bytes) -> None:
    """Adds a seccomp filter to this process; raises OSError if the kernel refuses it."""
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(lines) // 8, lines)
    if libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), errno.errorcode[ctypes.get_errno()])


def _read(reader: int) -> bytes:
    """Returns the bytes that the child writes until its end, at most `_MAX_BYTES`."""
    said = bytearray()
    while len(said) < _MAX_BYTES and (part := os.read(reader, _READ_BYTES)):
        said += part
    return bytes(said)
