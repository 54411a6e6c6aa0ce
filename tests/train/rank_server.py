"""Forks the ranks of tests from one process that has imported Megatron once: each rank saves four seconds of imports.

`SERVER.run` starts that process as ``python rank_server.py`` when it is first called; tests/conftest.py ends it.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class RankServer:
    """Runs Python programmes, each in a forked process, and returns their exit statuses and standard errors."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, programmes: Sequence[Sequence[str]], *, timeout_s: float) -> list[tuple[int, str]]:
        """Each programme is a path of a script, or the name of a module, and its arguments; all run at a time.

        Raises TimeoutError, and kills them all, if they have not ended after ``timeout_s`` seconds.
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
                told = "\n".join(path.read_text() for path in errors if path.exists())
                raise TimeoutError(f"{programmes} have not ended after {timeout_s:g} s:\n{told}")
            answer = process.stdout.readline()
            assert answer, "the process that forks ranks has ended; its stderr tells why"
            return list(zip(json.loads(answer), [path.read_text() for path in errors], strict=True))

    def close(self) -> None:
        """Kills the server and what it runs."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)  # It is not reaped yet, so the group is still its own.
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


def _run(words: list[str], errors: str, folder: str) -> NoReturn:
    """Runs one programme as `python` would, and ends this process."""
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
    except BaseException:  # Python itself ends with status 1 and the traceback of any exception.
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(int(status))  # During an orderly exit the threads of gloo may abort the process.


def main() -> None:
    import safetensors.torch
    import torch

    import relax_core.train.critic_backend
    import relax_core.train.policy_backend  # noqa: F401

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
