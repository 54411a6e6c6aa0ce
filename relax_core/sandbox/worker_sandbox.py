"""Builds the sandbox of a Relax worker process, such as the worker of isolated rewards.

Outside of the sandbox, the process has the user id of the run. It can therefore read an interpreter that only root
or this user can read. The id gives no further access: the process has no capabilities, sees the machine's files
read-only, and sees no secrets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from relax_core.sandbox.bwrap_command import SandboxRefused, bwrap_command, filter_descriptor, refusal

_ROOT = Path(__file__).resolve().parents[2]
# Only these folders of a checkout are visible, because a checkout may contain runs. An installed Relax is a package.
_CODE = ("relax_core", "rewards")
_PACKAGES = ("site-packages", "dist-packages")
_VARIABLES = ("LANG", "LC_ALL", "TZ", "PYTHONHASHSEED", "NLTK_DATA")  # inherited variables; no secrets
_UID = "1000"  # not 65534, which owns other users' files in the sandbox
_DISK_MIB = 64
_START_S = 60.0


@dataclass(frozen=True, kw_only=True)
class WorkerSandbox:
    """Holds the paths that a worker process can read in addition to the interpreter, packages and Relax's code.

    ``read_only`` are files and folders. ``imports`` are paths of packages and modules that the process may import.
    """

    read_only: tuple[Path, ...] = ()
    imports: tuple[Path, ...] = ()

    def command(self, stack: ExitStack, *, variables: dict[str, str]) -> tuple[list[str], int]:
        """Returns a prefix for the interpreter's command, and a descriptor that the process must inherit.

        The descriptor is open until the end of ``stack``. Raises `SandboxRefused` if bubblewrap is not installed.
        """
        packages = _package_folders()
        above = [str(path.parent) for path in self.imports]
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(Path.home()),  # libraries search for data there; `read_only` has the needed paths
            "LANG": "C.UTF-8",
            **{name: os.environ[name] for name in _VARIABLES if name in os.environ},
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *map(str, packages), *above]),
            "PYTHONDONTWRITEBYTECODE": "1",
            **variables,
        }
        seccomp = filter_descriptor(stack, keep_modes=True)
        paths = [*_interpreter(), *packages, *(_ROOT / name for name in _CODE), *self.imports, *self.read_only]
        sandbox = bwrap_command(seccomp, disk_mib=_DISK_MIB, environment=environment, read_only=_needed(paths))
        return [sandbox[0], "--uid", _UID, "--gid", _UID, *sandbox[1:]], seccomp


@cache
def worker_refusal() -> str:
    """Returns why this machine cannot run the sandbox of a worker, with the fix; empty if the machine can."""
    with ExitStack() as stack:
        try:
            words, seccomp = WorkerSandbox().command(stack, variables={})
            done = subprocess.run(
                [*words, sys.executable, "-c", "import relax_core"],
                pass_fds=[seccomp],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={"PATH": os.environ.get("PATH", "")},
                timeout=_START_S,
                check=False,
            )
        except (SandboxRefused, PermissionError) as error:
            return str(error)
        except subprocess.TimeoutExpired:
            return f"the sandbox did not start within {_START_S:g} s"
    return "" if done.returncode == 0 else refusal(done.stdout)


def _interpreter() -> list[Path]:
    """Returns the paths of the interpreter and its library, with links and with resolved links."""
    found = [Path(prefix) for prefix in (sys.prefix, sys.base_prefix)]
    hop = Path(sys.executable)
    while True:
        found.append(hop.parent.resolve() / hop.name)
        if not hop.is_symlink():
            break
        hop = hop.parent / hop.readlink()
    return [*found, *(path.resolve() for path in found)]


def _package_folders() -> list[Path]:
    """Returns the folders of installed packages. Other folders on sys.path are the user's and may hold any files."""
    return [Path(entry) for entry in sys.path if Path(entry).name in _PACKAGES and Path(entry).is_dir()]


def _needed(paths: Sequence[Path]) -> list[Path]:
    """Returns the existing paths without paths in /usr or below another path, sorted for mounting."""
    found: list[Path] = []
    for path in sorted({path for path in paths if path.exists()}, key=lambda path: len(path.parts)):
        if not any(path.is_relative_to(above) for above in (Path("/usr"), *found)):
            found.append(path)
    return found
