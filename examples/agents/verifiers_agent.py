"""An agent that plays one task of a taskset of the package verifiers 0.4; the reward is the taskset's own.

    python verifiers_agent.py TASKSET [HARNESS]

TASKSET and HARNESS are names as the package knows them, or modules that can be imported. The task is the row's column
"task", or its "seed", as a number in the taskset. It runs where verifiers is installed, which needs an environment of
its own: env=agent agent.python=.venv-verifiers/bin/python.
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
        return {"error": "; ".join(f"{one.type}: {one.message}" for one in trace.errors)}
    return {"reward": trace.reward, "metrics": {"turns": trace.num_turns}}


def main() -> None:
    taskset, harness, *_ = [*sys.argv[1:], "null"]
    row = json.loads(Path(os.environ["RELAX_TASK"]).read_text())
    result = asyncio.run(play(row, taskset, harness))
    Path(os.environ["RELAX_RESULT"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
