"""The agent of env=verifiers: plays one task of a taskset of the package verifiers 0.4, and returns the reward.

    python verifiers_program.py TASKSET HARNESS

TASKSET and HARNESS are names that the package knows, or paths of files that end in .py. The row's column "task", or
else "seed", is the number of the task in the taskset. The program runs in the Python interpreter agent.python, and does
not import Relax.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_taskset, taskset_class


async def play(row: dict[str, Any], taskset: str, harness: str) -> dict[str, Any]:
    """Plays one task, and returns the agent's result."""
    tasks = load_taskset(vf.TasksetConfig(id=taskset))
    number = int(row.get("task", row.get("seed", 0)))
    if not taskset_class(taskset).INFINITE:
        number %= sum(1 for _ in tasks)
    (task,) = itertools.islice(tasks, number, number + 1)
    agent = vf.make_agent(
        vf.AgentConfig.model_validate(
            {
                "harness": {"id": harness},
                "runtime": {"type": "subprocess"},
                "model": "policy",
                "client": {
                    "type": "eval",
                    "base_url": os.environ["OPENAI_BASE_URL"],
                    "api_key_var": "OPENAI_API_KEY",
                },
            }
        )
    )
    trace = await agent.run(task)
    if trace.errors:
        return {"error": "; ".join(f"{error.type}: {error.message}" for error in trace.errors)}
    return {"reward": trace.reward, "metrics": {"turns": trace.num_turns}}


def importable(name: str) -> str:
    """Returns the name of a module; makes a file importable under its name without .py."""
    if not name.endswith(".py"):
        return name
    sys.path.append(str(Path(name).parent))
    return Path(name).stem


def main() -> None:
    """Plays the task of the file RELAX_TASK, and writes the result to the file RELAX_RESULT."""
    taskset, harness = map(importable, sys.argv[1:])
    row = json.loads(Path(os.environ["RELAX_TASK"]).read_text())
    result = asyncio.run(play(row, taskset, harness))
    Path(os.environ["RELAX_RESULT"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
