"""Writes the seccomp filter of the sandbox: the system calls that no program of a model needs fail with EPERM.

The filter is a program of the kernel's classic packet filter (linux/filter.h); `man 2 seccomp` describes its input.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass
from functools import cache

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_X32 = 0x40000000  # the bit in the numbers of x86-64's second set of system calls
# CLONE_NEWTIME | NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_NEW_NAMESPACES = 0x00000080 | 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000

# name → its number on x86-64 and on arm64: keys of the kernel, other processes, mounts, namespaces, programs in the
# kernel, and memory that is not counted
REFUSED = {
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
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
    "syslog": (103, 116),
    "memfd_create": (319, 279),  # its memory belongs to no process, so that no limit would count it
    "shmget": (29, 194),  # the same
}
CLONE = (56, 220)
CLONE3 = (435, 435)  # its flags are in memory that a filter cannot read: ENOSYS makes libraries use clone


@dataclass(frozen=True)
class Architecture:
    """Is a processor that the filter knows: the kernel's number for it, and its place in the table above."""

    audit: int
    column: int


ARCHITECTURES = {"x86_64": Architecture(0xC000003E, 0), "aarch64": Architecture(0xC00000B7, 1)}


@cache
def seccomp_filter() -> bytes:
    """Returns the filter for this machine as an array of struct sock_filter, for ``bwrap --seccomp``.

    Raises RuntimeError on a processor that it does not know.
    """
    machine = platform.machine()
    if (architecture := ARCHITECTURES.get(machine)) is None:
        known = ", ".join(ARCHITECTURES)
        raise RuntimeError(f"the sandbox has no filter of system calls for {machine}, but for {known}.")
    column = architecture.column
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_JUMP_EQUAL, architecture.audit, yes=1),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
        _line(_JUMP_AT_LEAST, _X32, no=1),
        _line(_RETURN, _ERROR | errno.ENOSYS),
        _line(_JUMP_EQUAL, CLONE3[column], no=1),
        _line(_RETURN, _ERROR | errno.ENOSYS),
    ]
    for numbers in REFUSED.values():
        lines += [_line(_JUMP_EQUAL, numbers[column], no=1), _line(_RETURN, _ERROR | errno.EPERM)]
    lines += [
        _line(_JUMP_EQUAL, CLONE[column], no=3),
        _line(_LOAD, _FIRST_ARGUMENT),
        _line(_JUMP_ANY_BIT, _NEW_NAMESPACES, no=1),
        _line(_RETURN, _ERROR | errno.EPERM),
        _line(_RETURN, _ALLOW),
    ]
    return b"".join(lines)


def _line(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """Returns an instruction; ``yes`` and ``no`` are the numbers of instructions that a jump leaves out."""
    return struct.pack("=HBBI", code, yes, no, value)
