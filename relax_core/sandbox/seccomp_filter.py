"""Builds the seccomp filter of the sandbox: system calls that a model's programs do not need fail with EPERM.

The filter is a program for the kernel's classic packet filter (linux/filter.h); `man 2 seccomp` describes the input.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

_LOAD, _AND, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; an argument has 8 bytes
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_DONE = _ERROR  # the error number 0: the call returns 0 and does nothing
_X32 = 0x40000000  # this bit is set in the numbers of x32 system calls (x86-64)
_NONE = -1  # the number of a system call that a processor does not have
# CLONE_NEWTIME | NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_NEW_NAMESPACES = 0x00000080 | 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_SHARED_ANONYMOUS = 0x01 | 0x20  # MAP_SHARED | MAP_ANONYMOUS; MAP_SHARED_VALIDATE includes MAP_SHARED
_AF_UNIX = 1

# name of a system call → its numbers on x86-64 and arm64
REFUSED = {
    # keys of the kernel
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # mounts, namespaces and files by handle
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    # programs in the kernel, and parts of the kernel with a history of vulnerabilities
    "bpf": (321, 280),
    "seccomp": (317, 277),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "personality": (135, 92),
    "modify_ldt": (154, _NONE),
    "uselib": (134, _NONE),
    "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18),
    "vhangup": (153, 58),
    "set_mempolicy": (238, 237),
    "mbind": (237, 235),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "iopl": (172, _NONE),
    "ioperm": (173, _NONE),
    # memory that belongs to no process, so limits of processes do not include it
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "remap_file_pages": (216, 234),
    "vmsplice": (278, 75),  # a pipe keeps pages that the process has freed
    "splice": (275, 76),
    "tee": (276, 77),
    "io_setup": (206, 0),
    "epoll_create": (213, _NONE),  # a watch stays after its descriptor is closed; Python can use poll
    "epoll_create1": (291, 20),
    "inotify_init": (253, _NONE),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "landlock_create_ruleset": (444, 444),
    # sockets: the sandbox has no network, and a connection queue keeps the data of closed sockets
    "socket": (41, 198),
    "bind": (49, 200),
    "listen": (50, 201),
    "setsockopt": (54, 208),  # could raise the limit of a buffer
}
CLONE = (56, 220)
CLONE3 = (435, 435)  # a filter cannot read its flags in memory; after ENOSYS, libraries use clone
MMAP = (9, 222)
SOCKETPAIR = (53, 199)
FCNTL = (72, 25)
FLOCK = (73, 32)
IOCTL = (16, 29)
# A lock uses memory that no limit includes, and could block a file of /usr for programs outside. Programs such as
# sqlite need locks, but no other program uses the sandbox's own files. So a lock call succeeds without an effect.
_LOCKS = (6, 7, 37, 38)  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW
_REFUSED_FCNTL = (1024, 1026, 1031)  # F_SETLEASE, F_NOTIFY, F_SETPIPE_SZ
# A worker that runs as root owns the devices and could change their modes; devices cannot be mounted read-only.
MODES = {"chmod": (90, _NONE), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452)}
_REFUSED_IOCTL = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX write input to a terminal


# Also refused to a process of `answer_process`: to create processes, to run programs, to create or change files, and to
# affect other processes.
ANSWER_REFUSED = {
    "fork": (57, _NONE),
    "vfork": (58, _NONE),
    "clone": CLONE,
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "creat": (85, _NONE),
    "openat2": (437, 437),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "mkdir": (83, _NONE),
    "mkdirat": (258, 34),
    "mknod": (133, _NONE),
    "mknodat": (259, 33),
    "symlink": (88, _NONE),
    "symlinkat": (266, 36),
    "link": (86, _NONE),
    "linkat": (265, 37),
    "rename": (82, _NONE),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "unlink": (87, _NONE),
    "unlinkat": (263, 35),
    "rmdir": (84, _NONE),
    "socketpair": SOCKETPAIR,
}
OPEN = (2, _NONE)
OPENAT = (257, 56)
PRLIMIT = (302, 261)
_TO_WRITE = 0x01 | 0x02 | 0x40 | 0x200  # O_WRONLY | O_RDWR | O_CREAT | O_TRUNC


@dataclass(frozen=True)
class Architecture:
    """Holds a supported processor: its number ``audit`` in the kernel, and its ``column`` in the tables above."""

    audit: int
    column: int


ARCHITECTURES = {"x86_64": Architecture(0xC000003E, 0), "aarch64": Architecture(0xC00000B7, 1)}


@cache
def seccomp_filter(*, keep_modes: bool) -> bytes:
    """Returns the filter for this machine as an array of struct sock_filter, for ``bwrap --seccomp``.

    With ``keep_modes``, calls that change a file's mode succeed without an effect.

    Raises RuntimeError on an unsupported processor.
    """
    column = _column()
    refuse, done = _line(_RETURN, _ERROR | errno.EPERM), _line(_RETURN, _DONE)
    lines = [*_for_all(REFUSED, column, refuse), *_for_call(FLOCK[column], [done])]
    if keep_modes:
        lines += _for_all(MODES, column, done)
    lines += _for_call(CLONE[column], [_argument(0), _line(_JUMP_ANY_BIT, _NEW_NAMESPACES, no=1), refuse])
    lines += _for_call(
        MMAP[column],
        [_argument(3), _line(_AND, _SHARED_ANONYMOUS), _line(_JUMP_EQUAL, _SHARED_ANONYMOUS, no=1), refuse],
    )
    lines += _for_call(SOCKETPAIR[column], [_argument(0), _line(_JUMP_EQUAL, _AF_UNIX, yes=1), refuse])
    lines += _for_call(IOCTL[column], [_argument(1), *_for_values(_REFUSED_IOCTL, refuse)])
    lines += _for_call(FCNTL[column], [_argument(1), *_for_values(_REFUSED_FCNTL, refuse), *_for_values(_LOCKS, done)])
    return _program(lines, column)


@cache
def answer_filter() -> bytes:
    """Returns the additional filter for a process of `answer_process`, in the format of `seccomp_filter`."""
    column = _column()
    refuse = _line(_RETURN, _ERROR | errno.EPERM)
    lines = _for_all(ANSWER_REFUSED, column, refuse)
    for numbers, flags in ((OPEN, 1), (OPENAT, 2)):
        if numbers[column] != _NONE:
            lines += _for_call(numbers[column], [_argument(flags), _line(_JUMP_ANY_BIT, _TO_WRITE, no=1), refuse])
    lines += _for_call(PRLIMIT[column], [_argument(0), _line(_JUMP_EQUAL, 0, yes=1), refuse])  # 0: the calling process
    return _program(lines, column)


def _column() -> int:
    """Returns the tables' column for this machine's processor."""
    machine = platform.machine()
    if (architecture := ARCHITECTURES.get(machine)) is None:
        known = ", ".join(ARCHITECTURES)
        raise RuntimeError(f"the sandbox has no filter of system calls for {machine}, but for {known}.")
    return architecture.column


def _program(lines: list[bytes], column: int) -> bytes:
    """Returns a complete filter: calls of another architecture kill the process, and calls of x32 fail."""
    audit = next(architecture.audit for architecture in ARCHITECTURES.values() if architecture.column == column)
    before = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_JUMP_EQUAL, audit, yes=1),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        _line(_JUMP_AT_LEAST, _X32, no=1),
        _line(_RETURN, _ERROR | errno.ENOSYS),
        *_for_call(CLONE3[column], [_line(_RETURN, _ERROR | errno.ENOSYS)]),
    ]
    return b"".join([*before, *lines, _line(_RETURN, _ALLOW)])


def _for_all(table: Mapping[str, tuple[int, int]], column: int, result: bytes) -> list[bytes]:
    """Returns the instructions that return ``result`` for every system call of a table."""
    return [line for both in table.values() if both[column] != _NONE for line in _for_call(both[column], [result])]


def _for_call(number: int, body: list[bytes]) -> list[bytes]:
    """Returns the instructions for one system call; the call is allowed if ``body`` returns no result."""
    return [_line(_JUMP_EQUAL, number, no=len(body) + 1), *body, _line(_RETURN, _ALLOW)]


def _for_values(values: tuple[int, ...], result: bytes) -> list[bytes]:
    """Returns the instructions that return ``result`` if the loaded argument is one of these values."""
    return [line for value in values for line in (_line(_JUMP_EQUAL, value, no=1), result)]


def _argument(number: int) -> bytes:
    """Returns the instruction that loads the lower half of an argument; both processors store the lower half first."""
    return _line(_LOAD, _ARGUMENTS + 8 * number)


def _line(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """Returns an instruction; ``yes`` and ``no`` are the numbers of instructions that a jump skips in each case."""
    return struct.pack("=HBBI", code, yes, no, value)
