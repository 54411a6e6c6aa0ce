"""The program inside the sandbox: it sets limits for itself and runs the code from stdin.

The interpreter gets this program as text, because the sandbox has no files of Relax. The arguments are the limits (CPU
seconds, bytes of memory, processes, bytes of a file) and the descriptor of a socket. Through the socket, the program
sends a descriptor of /tmp to the process outside, which counts the files in /tmp.
"""

import os
import resource
import socket
import sys
from types import TracebackType

NAME = "code.py"  # file name of the code in error messages


def limit(kind: int, value: int, *, grace: int = 0) -> None:
    """Sets a limit that the process cannot raise again. If the current limit is lower, it stays.

    ``grace`` is the difference between the hard limit and the soft limit, which sends a signal.
    """
    most = resource.getrlimit(kind)[1]
    wanted = [value, value + grace] if value != resource.RLIM_INFINITY else [most, most]
    if most != resource.RLIM_INFINITY:
        wanted = [min(bound, most) for bound in wanted]
    resource.setrlimit(kind, (wanted[0], wanted[1]))


def tell(error: BaseException, where: TracebackType | None, source: str) -> None:
    """Prints an error with the source lines of the code, as Python does for a code file."""
    import linecache
    import traceback

    linecache.cache[NAME] = (len(source), None, source.splitlines(keepends=True), NAME)
    traceback.print_exception(type(error), error, where)


def main() -> None:
    """Runs the code as ``__main__``; prints an error of the code without the stack frames of this program."""
    cpu_s, memory_bytes, processes, file_bytes, ready = map(int, sys.argv[1:])
    source = sys.stdin.buffer.read().decode()
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_CPU, cpu_s, grace=1)  # the soft limit sends SIGXCPU, and the hard limit kills
    limit(resource.RLIMIT_FSIZE, file_bytes)
    limit(resource.RLIMIT_NOFILE, 64)  # each pipe or socket pair has up to 208 KiB of buffers
    limit(resource.RLIMIT_SIGPENDING, 64)  # also limits timers
    limit(resource.RLIMIT_MSGQUEUE, 0)
    limit(resource.RLIMIT_NPROC, processes)
    limit(resource.RLIMIT_AS, memory_bytes)
    with socket.socket(fileno=ready) as owner:
        tmp = os.open("/tmp", os.O_PATH | os.O_DIRECTORY)
        socket.send_fds(owner, [b"1"], [tmp])
        os.close(tmp)
    sys.argv[:] = [NAME]
    try:
        program = compile(source, NAME, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        tell(error, None, source)
        sys.exit(1)
    try:
        exec(program, {"__name__": "__main__"})
    except Exception as error:  # the code's own error
        tell(error, error.__traceback__ and error.__traceback__.tb_next, source)
        sys.exit(1)


if __name__ == "__main__":
    main()
