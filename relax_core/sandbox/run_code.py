"""Runs Python code in a sandbox: new namespaces, a read-only system, no network, and limits on all resources."""

from __future__ import annotations

import os
import pwd
import resource
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from relax_core.sandbox.bwrap_command import (
    MIB,
    SandboxRefused,
    bwrap_command,
    filter_descriptor,
    in_memory,
    refusal,
)
from relax_core.sandbox.control_group import ControlGroup, make_control_group

_UNUSED_UIDS = range(65519, 61183, -1)  # systemd uses these ids for short-lived services and never for a person
_SYSTEM_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
_START_S = 30.0  # limit for the start of the sandbox with its interpreter; the code's time begins after it
_CHECK_S = 0.1  # seconds between two checks of memory and files
_OWN_MIB = 32  # memory of bubblewrap and kernel objects in a control group
_OWN_PROCESSES = 4  # processes of bubblewrap and the process that enters the group
_END_S = 10.0
_READ_BYTES = 1 << 16
_SIGNAL_EXIT = 128  # bwrap's exit code is this number plus the signal that ended the program

Ended = Literal["exit", "wall_time", "cpu_time", "memory", "files", "output"]


@dataclass(frozen=True, kw_only=True)
class CodeLimits:
    """Holds the limits of one run of code.

    ``wall_s`` and ``cpu_s`` are seconds; ``cpu_s`` limits each process. ``memory_mib`` limits each process, and also
    all processes together. ``processes`` is the largest number of processes. ``disk_mib`` limits /tmp, the only
    writable folder, and each file in it. ``files`` is the largest number of files, folders and links in /tmp.
    ``output_bytes`` limits the output.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_mib: int = 512
    processes: int = 16
    disk_mib: int = 16
    files: int = 4096
    output_bytes: int = 65536


@dataclass(frozen=True, kw_only=True)
class CodeResult:
    """Holds the result of a run of code.

    ``ended`` is "exit", or the limit that ended the run. ``exit_code`` is negative for a signal. ``output`` has stdout
    and stderr, mixed in the order of the writes, cut at the limit. ``seconds`` is the duration.
    """

    ended: Ended
    exit_code: int
    output: str
    seconds: float


def run_code(code: str, limits: CodeLimits) -> CodeResult:
    """Runs Python code in the sandbox. Raises `SandboxRefused` if the sandbox does not start."""
    uid = _unused_uid() if os.getuid() == 0 else None
    python = _interpreter(uid)
    below = [] if python.is_relative_to("/usr") else [Path(sys.base_prefix).resolve()]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
    with ExitStack() as stack:
        group = make_control_group(
            memory_bytes=(limits.memory_mib + limits.disk_mib + _OWN_MIB) * MIB,
            processes=limits.processes + _OWN_PROCESSES,
        )
        if group is not None:
            stack.callback(group.remove)
        seccomp = filter_descriptor(stack)
        sandbox = bwrap_command(seccomp, disk_mib=limits.disk_mib, environment=environment, read_only=below)
        before = [] if group is None else group.enter
        return _run([*before, *_as_user(uid), *sandbox, str(python)], code, limits, inherited=(seccomp,), group=group)


def run_code_without_sandbox(code: str, limits: CodeLimits) -> CodeResult:
    """Runs Python code in a plain child process, with this process's access to files.

    The numbers of processes and files are not limited; the other limits apply. A process that leaves the code's session
    continues after the end.
    """
    return _run([sys.executable], code, replace(limits, processes=resource.RLIM_INFINITY, files=sys.maxsize))


def try_sandbox() -> None:
    """Tries the sandbox with one line of code. Raises `SandboxRefused`, with the fix, if the sandbox cannot run."""
    result = run_code("print(6 * 7)", CodeLimits())
    if result.output != "42\n":
        raise SandboxRefused(
            f"the sandbox ran a line of Python and it printed {result.output[:200]!r} ({result.ended})"
        )


@cache
def _unused_uid() -> int:
    """Returns a user id without account and processes; a process limit has no effect for root."""
    used = {account.pw_uid for account in pwd.getpwall()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError):
                used.add(entry.stat().st_uid)
    return next(uid for uid in _UNUSED_UIDS if uid not in used)


@cache
def _interpreter(uid: int | None) -> Path:
    """Returns a Python interpreter that the sandbox's user may run: of this process, or else of the system."""
    own = Path(sys.executable).resolve()
    for python in (own, Path("/usr/bin/python3")):
        if python.exists() and (uid is None or _open_to_others(python)):
            return python
    raise SandboxRefused(
        f"the sandbox runs code as a user without permission to read {own}, and there is no /usr/bin/python3. "
        "Install it (apt-get install python3), or put Relax's Python where every user may read it."
    )


def _as_user(uid: int | None) -> list[str]:
    """Returns a command prefix that switches to this user; empty for None.

    The program setpriv switches the user, because with Popen's own switch, the kernel would copy all page tables of
    this process, which takes 10 ms with torch.
    """
    if uid is None:
        return []
    if (program := shutil.which("setpriv", path=_SYSTEM_PATH)) is None:
        raise SandboxRefused("the sandbox needs setpriv, and setpriv is not installed: apt-get install util-linux.")
    return [program, f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]


def _open_to_others(path: Path) -> bool:
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in (path, *path.parents))


def _run(
    command: list[str],
    code: str,
    limits: CodeLimits,
    *,
    inherited: tuple[int, ...] = (),
    group: ControlGroup | None = None,
) -> CodeResult:
    """Runs the program `inside_sandbox.py` after the prefix ``command``; the process inherits ``inherited``."""
    program = Path(__file__).with_name("inside_sandbox.py").read_text(encoding="utf-8")
    given = [limits.cpu_s, limits.memory_mib * MIB, limits.processes, limits.disk_mib * MIB]
    with ExitStack() as stack:
        source = in_memory(stack, "code", code.encode(errors="replace"))
        ready, said = socket.socketpair()
        stack.callback(ready.close)
        try:
            process = subprocess.Popen(
                [*command, "-I", "-B", "-u", "-c", program, *map(str, given), str(said.fileno())],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(*inherited, said.fileno()),
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
                start_new_session=True,
            )
        except PermissionError as error:
            raise SandboxRefused(f"the sandbox's program may not be run: {error}") from error
        finally:
            said.close()
        try:
            disk = _disk(ready, process, stack)
            began = time.monotonic()
            output, ended = _output(
                process, limits, over=lambda: _over(process.pid, disk, limits, group), until=began + limits.wall_s
            )
        finally:
            _end(process)
        seconds = time.monotonic() - began
        _comes(ready.fileno(), limit_s=_END_S)  # for the end of the sandbox's first process, which also has this socket
    exit_code = process.returncode
    if _SIGNAL_EXIT < exit_code <= _SIGNAL_EXIT + signal.NSIG:
        exit_code = _SIGNAL_EXIT - exit_code
    if ended == "exit" and exit_code == -signal.SIGXCPU:
        ended = "cpu_time"
    if ended == "exit" and group is not None and group.out_of_memory():
        ended = "memory"
    return CodeResult(ended=ended, exit_code=exit_code, output=output.decode(errors="replace"), seconds=seconds)


def _disk(ready: socket.socket, process: subprocess.Popen[bytes], stack: ExitStack) -> int:
    """Waits for the start of the interpreter; returns a descriptor of its /tmp, open until the end of ``stack``.

    Raises `SandboxRefused` if the interpreter does not start.
    """
    if _comes(ready.fileno(), limit_s=_START_S):
        said, descriptors, _, _ = socket.recv_fds(ready, 1, 1)
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
            return descriptor
        assert not said, "the program of the sandbox sends its /tmp"
    assert process.stdout is not None
    printed = process.stdout.fileno()
    raise SandboxRefused(refusal(os.read(printed, _READ_BYTES) if _comes(printed, limit_s=_END_S) else b""))


def _comes(descriptor: int, *, limit_s: float) -> bool:
    """Waits up to ``limit_s`` seconds; returns True if data or end-of-file can be read from a descriptor."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, limit_s) * 1e3))


def _output(
    process: subprocess.Popen[bytes], limits: CodeLimits, *, over: Callable[[], Ended | None], until: float
) -> tuple[bytes, Ended]:
    """Reads the output of a process until its end or a limit; returns the output and how the process ended."""
    assert process.stdout is not None
    printed = process.stdout.fileno()
    received = bytearray()
    next_check = 0.0
    while (now := time.monotonic()) < until:
        if now >= next_check:
            next_check = now + _CHECK_S
            if (limit := over()) is not None:
                return bytes(received), limit
        if not _comes(printed, limit_s=min(until, next_check) - now):
            if process.poll() is not None:
                return bytes(received), "exit"  # without the sandbox, a detached process may keep the pipe open
            continue
        if not (part := os.read(printed, _READ_BYTES)):
            with suppress(subprocess.TimeoutExpired):
                process.wait(until - now)
                return bytes(received), "exit"
            break
        received += part
        if len(received) > limits.output_bytes:
            return bytes(received[: limits.output_bytes]), "output"
    return bytes(received), "wall_time"


def _over(pid: int, disk: int, limits: CodeLimits, group: ControlGroup | None) -> Ended | None:
    """Returns "memory" or "files" if process ``pid`` and its descendants exceed this limit, else None."""
    tmp = os.fstatvfs(disk)
    if tmp.f_files - tmp.f_ffree > limits.files:
        return "files"
    if _memory_bytes(pid) > limits.memory_mib * MIB or (group is not None and group.out_of_memory()):
        return "memory"
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its process group. When bwrap's process ends, the kernel kills the whole sandbox."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_END_S)
    assert process.stdout is not None
    process.stdout.close()


def _memory_bytes(pid: int) -> int:
    """Returns the memory of a process and all its descendants in bytes, without pages of files.

    The result includes swapped memory and page tables. Only a control group also counts other kernel memory.
    """
    used = 0
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:")):
                used += int(line.split()[1]) * 1024
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                used += _memory_bytes(int(child))
    return used
