"""Scores crafted answers in a separate process. Reports answers that made it execute code or open something.

Reads a JSON list of cases from the standard input and writes a list of results to the standard output. It is a separate
program, because an audit hook cannot be removed from a process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
from collections.abc import Mapping
from typing import Any

LIMIT_S = 3.0  # time limit per answer
_CODE = ("compile", "exec", "code.__new__", "marshal.loads", "pickle.find_class")
_PROCESS = ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen")
_FILES = ("os.mkdir", "os.remove", "os.rename", "os.symlink", "os.chmod")
_WATCHED = frozenset((*_CODE, *_PROCESS, *_FILES))


class Watch:
    """Records the interpreter's audit events while an answer is scored, except events of imports."""

    def __init__(self) -> None:
        self.on = False
        self.events: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        opens = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        if event in _WATCHED or event.startswith(("socket.", "ctypes.")) or opens:
            frame = sys._getframe(1)
            if not _is_exempt(frame):
                self.events.append(f"{event} {str(arguments[:1])[:120]} in {frame.f_code.co_qualname}")


def _is_exempt(frame: Any) -> bool:
    """Returns whether the running code is an import, or a code generator of sympy that uses no input text."""
    if frame.f_code.co_qualname == "MonomialOps._build":
        return True
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            return True
        frame = frame.f_back
    return False


class OutOfTime(BaseException):
    """Raised if an answer takes longer than `LIMIT_S`. No library catches this exception."""


def main() -> list[dict[str, Any]]:
    from relax_core.config.plugin_types import plugin_config
    from relax_core.contracts.reward import RewardInput
    from relax_core.registry import find_reward

    logging.disable(logging.CRITICAL)
    watch = Watch()
    results: list[dict[str, Any]] = []

    def ends(number: int, frame: Any) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, ends)
    prepared: dict[str, Any] = {}

    def scored(case: Mapping[str, Any]) -> str:
        reward = case["reward"]
        if reward not in prepared:
            prepared[reward] = find_reward(reward)
            prepared[reward].prepare()
        spec, config = prepared[reward], plugin_config("reward", reward, case.get("settings", {}), section="reward")
        row = {"prompt": "", "answer": case["answer"], **case.get("row", {})}
        given = RewardInput(response=case["response"], stopped=True, answer=case["answer"], row=row)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        watch.on = True
        try:
            if spec.check_row is not None:
                with contextlib.suppress(ValueError):
                    spec.check_row(row, config)
            return f"reward {spec.score(given, config).reward}"
        except OutOfTime:
            return "out of time"
        except Exception as error:  # in a worker process, the answer would have no reward
            return f"raises {type(error).__name__}"
        finally:
            watch.on = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    for case in json.load(sys.stdin):
        watch.events = []
        results.append({"ended": scored(case), "events": watch.events})
    return results


if __name__ == "__main__":
    results_go_to, sys.stdout = sys.stdout, sys.stderr  # a library may print
    json.dump(main(), results_go_to)
