"""An env with a tool: the policy writes Python code, and a sandbox runs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from relax_core.contracts.env import Action, BaseInteractionEnv, EnvSpec, EpisodeStart, InteractionConfig, StepResult
from relax_core.contracts.tool_calls import ToolCall, ToolMistake, call_tool
from relax_core.sandbox.run_code import (
    CodeLimits,
    CodeResult,
    SandboxRefused,
    run_code,
    run_code_without_sandbox,
    try_sandbox,
)

SANDBOXES = ("bwrap", "none")
# Limits of all calls of a response together, because a step must end before env.step_timeout_s; ``cpu_s`` is per
# process.
LIMITS = CodeLimits(wall_s=10.0, cpu_s=5, memory_mib=512, output_bytes=16384)
MIN_S = 0.05  # with less time left, code is not run


@dataclass(frozen=True)
class PythonConfig(InteractionConfig):
    """Holds the settings of the tool.

    ``sandbox`` is "bwrap" or "none"; with "none" the code runs with the rights of the run.
    """

    name: str = "python"
    sandbox: str = "bwrap"


class PythonTool(BaseInteractionEnv):
    """Shows the row's prompt, and runs the code of calls. A response without a call is the answer; it ends the episode.

    The env returns no reward: a reward plug-in, such as reward=math, scores the answer. Each call runs in a new
    process, with an empty folder and without earlier variables.
    """

    def __init__(self, start: EpisodeStart, config: PythonConfig) -> None:
        self._prompt = start.row["prompt"]
        self._run = run_code if config.sandbox == "bwrap" else run_code_without_sandbox
        self._limits = LIMITS
        self._calls = self._failed = 0

    def reset(self) -> Any:
        """Returns the prompt of the data row."""
        return self._prompt

    def step(self, action: Action) -> StepResult:
        """Returns the output of each call, or the end of the episode."""
        if action.tool_calls:
            until = time.monotonic() + self._limits.wall_s
            results = [self._result(call, until) for call in action.tool_calls]
            return StepResult(observation=[{"role": "tool", "content": text} for text in results])
        if action.parse_error:
            return StepResult(observation=action.parse_error)
        return StepResult(done=True, info={"tool_calls": self._calls, "failed_tool_calls": self._failed})

    def _result(self, call: ToolCall, until: float) -> str:
        """Returns the result of a call for the model; the call must end when the monotonic clock reaches ``until``."""
        self._calls += 1
        try:
            code: str = call_tool([python], call)
        except ToolMistake as mistake:
            self._failed += 1
            return str(mistake)
        left = until - time.monotonic()
        if left < MIN_S:
            self._failed += 1
            return f"[not run: the calls of a response have {self._limits.wall_s:g} s together]"
        result = self._run(code, replace(self._limits, wall_s=left))
        self._failed += result.ended != "exit" or result.exit_code != 0
        return shown(result, self._limits)


def python(code: Annotated[str, "the program; only its printed output is returned"]) -> str:
    """Runs a Python 3 program and returns its printed output. It has no network and keeps nothing between calls."""
    return code


def shown(result: CodeResult, limits: CodeLimits) -> str:
    """Returns the result of code as text for the model: the output and, for a failed program, how it ended."""
    ends = {
        "exit": f"[exit code {result.exit_code}]" if result.exit_code else "",
        "wall_time": f"[ended after {limits.wall_s:g} s]",
        "cpu_time": f"[ended after {limits.cpu_s} s of CPU time]",
        "memory": f"[ended at {limits.memory_mib} MiB of memory]",
        "files": f"[ended at {limits.files} files]",
        "output": f"[ended at {limits.output_bytes} bytes of output]",
    }
    return "\n".join(part for part in (result.output.rstrip("\n"), ends[result.ended]) if part) or "[no output]"


def tools(row: Mapping[str, Any], config: PythonConfig) -> Sequence[Callable[..., Any]]:
    """Returns the tool."""
    return [python]


def check(config: PythonConfig) -> None:
    """Raises ValueError for invalid settings, or if this machine cannot run the sandbox."""
    if config.sandbox not in SANDBOXES:
        raise ValueError(f"env.sandbox={config.sandbox}: use {' or '.join(SANDBOXES)}.")
    if config.step_timeout_s <= LIMITS.wall_s:
        raise ValueError(
            f"env.step_timeout_s={config.step_timeout_s:g}: must be above {LIMITS.wall_s:g} s, the time limit of "
            "the code of a response. Raise env.step_timeout_s."
        )
    if config.sandbox == "bwrap":
        try:
            try_sandbox()
        except SandboxRefused as error:
            raise ValueError(
                f"env.sandbox=bwrap: {error} Or use env.sandbox=none, which runs the model's code with your rights."
            ) from error


SPEC = EnvSpec(
    name="python",
    summary="the policy writes Python code, and a sandbox runs it",
    config=PythonConfig,
    open=PythonTool,
    tools=tools,
    check=check,
)
