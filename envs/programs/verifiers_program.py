"""The agent of env=verifiers: it plays one task of a taskset of the package verifiers 0.4, and returns its reward.

    python verifiers_program.py TASKSET HARNESS

TASKSET and HARNESS are names as the package knows them, or paths of files that end in .py. The task is the row's column
"task", or its "seed", as a number in the taskset. It runs in the Python of agent.python, and imports nothing of Relax.
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
    """Returns the result of one task."""
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
    """Returns the name of a module; a file is made importable under its name without .py."""
    if not name.endswith(".py"):
        return name
    sys.path.append(str(Path(name).parent))
    return Path(name).stem


def main() -> None:
    """Plays the task in the file RELAX_TASK."""
    taskset, harness = map(importable, sys.argv[1:])
    row = json.loads(Path(os.environ["RELAX_TASK"]).read_text())
    result = asyncio.run(play(row, taskset, harness))
    Path(os.environ["RELAX_RESULT"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
