"""Starts scripts of this folder as the ranks of one model, one process for each.

One server process imports Megatron and the towers of transformers and then forks the ranks. This saves seven seconds
per rank. The first call of `SERVER.run` starts the server as ``python rank_server.py``; tests/conftest.py ends the
server.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.ports import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class RankServer:
    """Runs Python programs in forked processes and returns their exit statuses and standard errors."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, programmes: Sequence[Sequence[str]], *, timeout_s: float) -> list[tuple[int, str]]:
        """Runs all programs at the same time. A program is the path of a script or the name of a module, with
        arguments.

        If some programs still run after ``timeout_s`` seconds, kills all programs and raises TimeoutError.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            errors = [Path(folder, str(place)) for place, _ in enumerate(programmes)]
            calls = [
                {"words": list(words), "errors": str(path)} for words, path in zip(programmes, errors, strict=True)
            ]
            print(json.dumps({"calls": calls, "folder": os.getcwd()}), file=process.stdin, flush=True)
            if not select.select([process.stdout], [], [], timeout_s)[0]:
                self.close()
                message = "\n".join(path.read_text() for path in errors if path.exists())
                raise TimeoutError(f"{programmes} have not ended after {timeout_s:g} s:\n{message}")
            answer = process.stdout.readline()
            assert answer, "the process that forks ranks has ended; its stderr has the cause"
            return list(zip(json.loads(answer), [path.read_text() for path in errors], strict=True))

    def close(self) -> None:
        """Kills the server and its programs."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)  # not reaped, so it still has the group id
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{HERE}", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


SERVER = RankServer()


def run_ranks(
    script: str, arguments: Sequence[Sequence[object]], *, world_size: int | None = None, timeout_s: float = 600.0
) -> list[tuple[int, str]]:
    """Runs ``script`` as rank 0, 1, … and returns the exit status and stderr of each.

    The script's arguments are <rank> <world size> <port> and the rank's ``arguments``. If ``world_size`` is larger than
    the number of processes, some ranks never join.
    """
    port, size = free_port(), world_size or len(arguments)
    programmes = [[str(HERE / script), *map(str, (rank, size, port, *own))] for rank, own in enumerate(arguments)]
    return SERVER.run(programmes, timeout_s=timeout_s)


def run_programme(*words: object, timeout_s: float = 600.0) -> None:
    """Runs a script of this folder, or a module by name, with arguments, in the same way as ranks."""
    programme = [str(HERE / word) if word.endswith(".py") else word for word in map(str, words)]
    ((status, error),) = SERVER.run([programme], timeout_s=timeout_s)
    assert status == 0, error


def run_dp_ranks(
    folder: Path,
    output: Path,
    *,
    steps: list[int],
    sharded: bool = False,
    timeout_s: float = 300.0,
    what: str = "policy",
) -> list[tuple[int, str]]:
    """Runs two data-parallel ranks (dp_rank.py), each for its number of ``steps``.

    The second rank may never join. A rank with fewer steps exits before the other rank ends.
    """
    settings = {"sharded": sharded, "timeout_s": timeout_s, "head": what, "most": max(steps)}
    arguments = [(folder, output, json.dumps({**settings, "steps": own})) for own in steps]
    return run_ranks("dp_rank.py", arguments, world_size=2)


def run_alone_and_on_two_ranks(
    folder: Path, alone: Callable[[Path], None], rank_main: Callable[[Path, int, int], None]
) -> int:
    """Runs ``alone(folder)``, then ``rank_main(folder, rank, port)`` on two ranks. Returns the largest exit code."""
    import torch

    torch.set_num_threads(1)
    port = free_port()
    fork = multiprocessing.get_context("fork")  # imports take seconds, so one process runs all layouts
    single = fork.Process(target=alone, args=(folder,))
    single.start()
    single.join()
    ranks = [fork.Process(target=rank_main, args=(folder, rank, port)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in (single, *ranks))


def _run(words: list[str], errors: str, folder: str) -> NoReturn:
    """Runs one program like `python`, and ends this process."""
    with Path(errors).open("w") as file:
        os.dup2(file.fileno(), 2)
    with Path(os.devnull).open("r+") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    status: Any = 0
    try:
        os.chdir(folder)
        sys.argv = words
        if words[0].endswith(".py"):
            runpy.run_path(words[0], run_name="__main__")
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code or 0
    except BaseException:  # Python itself exits with status 1 and a traceback for any exception
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(int(status))  # During a normal exit gloo's threads may abort the process.


def main() -> None:
    import safetensors.torch
    import torch

    from tests.simulated_device.simgpu import register_if_chosen

    register_if_chosen()
    import relax_core.train.critic_backend
    import relax_core.train.policy_backend  # noqa: F401

    for name in ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "qwen3_5", "qwen3_5_moe"):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    assert torch.get_num_threads() == 1 and safetensors.torch
    for line in sys.stdin:
        asked = json.loads(line)
        ranks = []
        for call in asked["calls"]:
            if not (pid := os.fork()):
                _run(call["words"], call["errors"], asked["folder"])
            ranks.append(pid)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    main()
