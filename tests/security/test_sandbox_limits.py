"""Tests programs that try to exceed the sandbox's limits of memory, files or processes, or to escape from it.

Every attack in `OLD` succeeded on commit f5979362.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from relax_core.sandbox import bwrap_command, control_group
from relax_core.sandbox import run_code as module
from relax_core.sandbox.control_group import _Base, _bases, make_control_group
from relax_core.sandbox.run_code import CodeLimits, CodeResult, SandboxRefused, run_code, try_sandbox
from relax_core.sandbox.seccomp_filter import ARCHITECTURES, MMAP, REFUSED

ROOT = Path(__file__).parents[2]
LIMITS = CodeLimits(memory_mib=128, wall_s=60, cpu_s=20)
COLUMN = ARCHITECTURES[os.uname().machine].column
NUMBERS = {name: both[COLUMN] for name, both in {**REFUSED, "mmap": MMAP}.items()}
START = f"""
import ctypes, mmap, os, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.syscall.restype = ctypes.c_long
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
NR = {NUMBERS!r}
MIB = 2**20
kept = []

def checked(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def call(name, *given):
    return checked(libc.syscall(NR[name], *given))

def mapped(size, flags, fd=-1, at=None, protection=3):
    return checked(libc.mmap(at, size, protection, flags, fd, 0))

def hold(attack, *, processes=12):
    # Each process gives the MiB that it holds outside of its own memory.
    readers = []
    for _ in range(processes):
        reader, writer = os.pipe()
        if not os.fork():
            try:
                held = attack()
            except BaseException as error:
                print(repr(error)[:200])
                held = 0
            os.write(writer, b"%d " % held)
            time.sleep(600)
        os.close(writer)
        readers.append(reader)
    held = sum(int(os.read(one, 100) or 0) for one in readers)
    time.sleep(0.3)  # the owner looks ten times a second
    print("HELD" if held > 250 else "stopped", held, flush=True)

def shared(flags, fd=-1):
    at = mapped(60 * MIB, flags, fd)
    for part in range(at, at + 60 * MIB, MIB):
        ctypes.memset(part, 1, MIB)
        libc.madvise(part, MIB, 4)  # MADV_DONTNEED: the process no longer counts it
    return 60

def fill(one):
    held = 0
    try:
        while True:
            held += os.write(one, b"x" * 32768)
    except BlockingIOError:
        return held
"""

OLD = {
    "shared anonymous memory": "hold(lambda: shared(0x21))",
    "shared memory of /dev/zero": "hold(lambda: shared(0x01, os.open('/dev/zero', os.O_RDWR)))",
    "System V message queues": """
body, held = ctypes.create_string_buffer(8 + 8192), 0
ctypes.cast(body, ctypes.POINTER(ctypes.c_long))[0] = 1
while held < 300 * MIB:
    queue = call("msgget", 0, 0o1600)
    call("msgsnd", queue, body, 8192, 0o4000)
    call("msgsnd", queue, body, 8192 - 16, 0o4000)
    held += 16384
print("HELD")
""",
    "System V semaphores": "for _ in range(200):\n    call('semget', 0, 32000, 0o1600)\nprint('HELD')",
    "secret memory": "print('HELD', call('memfd_secret', 0))",
    "POSIX message queues": "print('HELD', call('mq_open', b'x', 0o102, 0o600, 0))",
    "inodes": """
for folder in range(100):
    os.mkdir(f"/tmp/{folder}")
    for n in range(3000):
        os.symlink("x" * 30, f"/tmp/{folder}/{n}")
print("HELD")
""",
    "extended attributes": """
for n in range(5000):
    os.close(os.open(f"/tmp/{n}", os.O_CREAT))
    os.setxattr(f"/tmp/{n}", "user.x", b"x" * 60000)
print("HELD")
""",
    "buffers of sockets": """
def attack():
    held = 0
    try:
        while held < 60 * MIB:
            for one in socket.socketpair():
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
                one.setblocking(False)
                kept.append(one)
                held += fill(one.fileno())
    except OSError:
        if not held:
            raise
    return held // MIB
hold(attack)
""",
    "a queue of closed connections": """
def attack():
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"\\0{os.getpid()}")
    server.listen(4096)
    kept.append(server)
    held = 0
    while held < 60 * MIB:
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        client.connect(f"\\0{os.getpid()}")
        held += fill(client.fileno())
        client.close()
    return held // MIB
hold(attack)
""",
    "pages that a pipe keeps": """
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
def attack():
    for _ in range(20):
        kept.append(os.pipe())
        at = mapped(4 * MIB, 0x22)
        start = -(-at // (2 * MIB)) * 2 * MIB
        libc.madvise(start, 2 * MIB, 14)  # one large page
        ctypes.memset(start, 1, 2 * MIB)
        call("vmsplice", kept[-1][1], ctypes.byref(Part(start, 64)), 1, 2)
        libc.munmap(at, 4 * MIB)
    return 40
hold(attack)
""",
    "page tables": """
def attack():
    for n in range(8000):  # a page in each GiB: the zero page, which counts for nobody
        ctypes.string_at(mapped(4096, 0x4022, at=(1 << 36) + (n << 30), protection=1), 1)
    return 62
hold(attack)
""",
    "timers": """
timer, made = ctypes.c_int(), 0
while made < 2000:
    checked(libc.syscall(222 if NR["keyctl"] == 250 else 107, 1, 0, ctypes.byref(timer)))
    made += 1
print("HELD")
""",
    "watches of files": "print('HELD', call('inotify_init1', 0))",
    "terminals": "import pty\nprint('HELD', pty.openpty())",
    "other families of sockets": """
made = set()
for family in range(1, 46):
    for kind in (1, 2, 3, 5):
        if libc.syscall(NR["socket"], family, kind, 0) >= 0:
            made.add(family)
print("HELD" if made else "stopped", made)
""",
    "growth of its own source": "for _ in range(10):\n    os.pwrite(0, b'x' * MIB, os.fstat(0).st_size)\nprint('HELD')",
    "more descriptors": "kept = [os.open('/usr', os.O_RDONLY) for _ in range(100)]\nprint('HELD')",
    "record locks": """
import fcntl
for n in range(5):
    kept.append(os.open(f"/tmp/{n}", os.O_RDWR | os.O_CREAT))
    for at in range(1000):
        fcntl.lockf(kept[-1], fcntl.LOCK_EX, 1, at * 2)
if not os.fork():  # a lock that is kept refuses the other process
    try:
        for one in kept:
            fcntl.lockf(one, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    except OSError:
        print("HELD", flush=True)
    os._exit(0)
os.wait()
""",
    "a larger pipe": "import fcntl\nprint('HELD', fcntl.fcntl(os.pipe()[1], 1031, MIB))",
}
# These attacks already failed on commit f5979362.
MORE = {
    "shared memory in another form": "hold(lambda: shared(0x23))",
    "memory that is swapped out": """
def attack():
    at = mapped(60 * MIB, 0x22)
    ctypes.memset(at, 1, 60 * MIB)
    libc.madvise(at, 60 * MIB, 21)
    return 60
hold(attack)
""",
    "pipes": """
def attack():
    held = 0
    try:
        while True:
            kept.append(os.pipe())
            os.set_blocking(kept[-1][1], False)
            held += fill(kept[-1][1])
    except OSError:
        return held // MIB
hold(attack)
""",
}


@pytest.fixture(scope="module", autouse=True)
def _needs_sandbox() -> None:
    try:
        try_sandbox()
    except SandboxRefused as error:
        pytest.skip(str(error))


def attacked(code: str, limits: CodeLimits = LIMITS) -> CodeResult:
    result = run_code(START + code, limits)
    assert result.ended != "wall_time", result
    return result


def holds(result: CodeResult) -> bool:
    return any(line.startswith("HELD") for line in result.output.splitlines())


@pytest.mark.parametrize("name", [*OLD, *MORE])
def test_an_attack_holds_nothing_without_a_control_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "make_control_group", lambda **limits: None)
    result = attacked({**OLD, **MORE}[name])
    assert not holds(result), result
    assert "NameError" not in result.output and "TypeError" not in result.output, result  # the attack has no bug


# The other calls that the filter refuses can hold little or no memory.
COUNTED = (
    "shared anonymous memory",
    "System V message queues",
    "System V semaphores",
    "extended attributes",
    "buffers of sockets",
    "a queue of closed connections",
    "pages that a pipe keeps",
)


@pytest.mark.parametrize("name", COUNTED)
def test_a_control_group_alone_counts_what_the_filter_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (group := make_control_group(memory_bytes=2**27, processes=8)) is None:
        pytest.skip("this process cannot make a control group")
    group.remove()
    allow = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)
    monkeypatch.setattr(bwrap_command, "seccomp_filter", lambda **_: allow)
    result = attacked(OLD[name])
    assert not holds(result) and result.ended in ("memory", "files"), result


def test_files_have_a_limit_of_their_own_end() -> None:
    assert attacked(OLD["inodes"]).ended == "files"
    code = "for n in range(1000):\n    open(f'/tmp/{n}', 'w').close()\ntime.sleep(0.5)\nprint('fine')"
    assert attacked(code).output == "fine\n"


def test_ordinary_programs_run() -> None:
    code = """
import asyncio, concurrent.futures, sqlite3, subprocess, tempfile, threading
import fcntl
async def two():
    process = await asyncio.create_subprocess_exec("/bin/echo", "of a child", stdout=-1)
    return (await process.communicate())[0].decode()
print(asyncio.run(two()), end="")
base = sqlite3.connect("/tmp/base")
base.execute("create table t (x)")
base.execute("insert into t values (7)")
base.commit()
print(sqlite3.connect("/tmp/base").execute("select x from t").fetchone())
with concurrent.futures.ThreadPoolExecutor(3) as pool:
    print(sum(pool.map(len, ["a", "bb", "ccc"])))
with tempfile.NamedTemporaryFile() as file:
    file.write(b"x" * 8192)
    file.flush()
    fcntl.flock(file, fcntl.LOCK_EX)
    memory = mmap.mmap(file.fileno(), 8192)
    memory[0:1] = b"y"
    print(memory[0:2])
print(len(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)), open("/dev/null").read() == "", len(os.urandom(8)))
"""
    assert attacked(code).output.splitlines() == ["of a child", "(7,)", "6", "b'yx'", "4096 True 8"]


def test_it_sees_nothing_of_the_machine_and_has_no_descriptor_but_its_own() -> None:
    code = """
opened = []
for one in range(64):
    try:
        os.fstat(one)
        opened.append(one)
    except OSError:
        pass
print(opened, sorted(os.listdir("/")), sorted(os.listdir("/dev")), os.path.exists("/etc/passwd"))
for path in ("/proc", "/sys", "/home", "/root", "/run", "/var", "/work", "/dev/shm", "/dev/pts"):
    assert not os.path.exists(path), path
"""
    result = attacked(code)
    assert result.exit_code == 0, result
    assert result.output.startswith("[0, 1, 2] ") and "['null', 'random', 'urandom'] False" in result.output, result


def test_it_holds_no_lock_on_a_file_of_the_system() -> None:
    file = Path("/usr/bin/env")
    code = f"""
import fcntl
held = os.open({str(file)!r}, os.O_RDONLY)
fcntl.flock(held, fcntl.LOCK_EX)
try:
    fcntl.fcntl(held, 1024, fcntl.F_RDLCK)
    print("lease")
except PermissionError:
    pass
os.set_inheritable(held, True)
os.execv("/bin/sleep", ["sleep", "611"])
"""
    owner = started(START + code)
    try:
        until = time.monotonic() + 60
        while not [
            child for child in psutil.Process(owner.pid).children(recursive=True) if child.cmdline()[-1:] == ["611"]
        ]:
            assert time.monotonic() < until and owner.poll() is None
            time.sleep(0.05)
        with file.open() as ours:
            fcntl.flock(ours, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        owner.kill()
        owner.wait(30)


def started(code: str) -> subprocess.Popen[bytes]:
    """Starts a program that runs code in the sandbox for a long time."""
    driver = "import sys; from relax_core.sandbox.run_code import *; run_code(sys.argv[1], CodeLimits(wall_s=600))"
    return subprocess.Popen([sys.executable, "-c", driver, code], cwd=ROOT)


def groups() -> list[Path]:
    return [path for base in control_group._usable_bases() for path in base.folder.glob("relax-sandbox-*")]


def test_a_control_group_is_removed_also_if_its_owner_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not control_group._usable_bases():
        pytest.skip("this process cannot make a control group")
    before = set(groups())
    attacked("print(1)")
    assert not {group for group in groups() if f"-{os.getpid()}-" in group.name}
    owner = started("import time; time.sleep(600)")
    until = time.monotonic() + 60

    def of_owner() -> list[Path]:
        return [group for group in groups() if group not in before and f"-{owner.pid}-" in group.name]

    while not of_owner() or not all((path / "cgroup.procs").read_text() for path in of_owner()):
        assert time.monotonic() < until
        time.sleep(0.05)
    inside = [int(pid) for path in of_owner() for pid in (path / "cgroup.procs").read_text().split()]
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait(30)
    while any(psutil.pid_exists(pid) for pid in inside):
        assert time.monotonic() < until, inside
        time.sleep(0.05)
    assert of_owner()  # the folder is not removed yet
    monkeypatch.setattr(control_group, "_LEFT_S", 0.0)
    control_group._usable_bases.cache_clear()
    control_group._usable_bases()
    assert not of_owner()


def test_the_folders_of_groups_are_found_in_both_versions(tmp_path: Path) -> None:
    """Plain folders simulate both versions of control groups, because a kernel has only one version."""
    memory, pids, unified = (tmp_path / name for name in ("memory", "pids", "unified"))
    for folder in (memory / "own", pids, unified / "slice" / "run.scope"):
        folder.mkdir(parents=True)
    mounts = "".join(
        f"30 20 0:30 / {folder} rw,relatime - {kind} cgroup rw{options}\n"
        for folder, kind, options in (
            (memory, "cgroup", ",memory"),
            (pids, "cgroup", ",pids"),
            (unified, "cgroup2", ",nsdelegate"),
        )
    )
    found = _bases("4:memory:/own\n8:pids:/\n3:cpu:/\n", mounts)
    assert found == [
        _Base(memory / "own", 1, frozenset({"memory"})),
        _Base(pids, 1, frozenset({"pids"})),
    ]
    own = "0::/slice/run.scope\n"
    (unified / "slice" / "run.scope" / "cgroup.subtree_control").write_text("\n")
    (unified / "slice" / "cgroup.subtree_control").write_text("cpu\n")
    assert _bases(own, mounts) == []
    (unified / "slice" / "cgroup.subtree_control").write_text("cpu memory pids\n")
    assert _bases(own, mounts) == [_Base(unified / "slice", 2, frozenset({"memory", "pids"}))]
    assert _bases("0::/../other\n", mounts) == []
