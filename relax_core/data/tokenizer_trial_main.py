"""The main program of the process that `try_tokenizer` starts: loads a tokenizer and renders its chat template.

``python -m relax_core.data.tokenizer_trial_main``
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from relax_core.contracts.child_process import OwnerPipe, Ready, cpu_limit
from relax_core.data.tokenizer import PromptTokenizer, load_tokenizer
from relax_core.data.tokenizer_trial import LOAD_S, MEMORY_GIB, RENDER_S, TokenizerTrial, TrialResult

_TOO_MUCH = (MemoryError, RecursionError, OverflowError)
_USER, _ANSWER = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "tool", "arguments": {"value": "1"}}}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]},
    },
}
_CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    ([_USER], None),
    ([{"role": "system", "content": "Count."}, _USER], None),
    ([_USER, _ANSWER, _USER], None),
    ([{"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}], None),
    ([_USER], [_TOOL]),
    (
        [
            _USER,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "name": "tool", "tool_call_id": "call00000", "content": "2"},
        ],
        [_TOOL],
    ),
]


def main() -> None:
    """Reads a `TokenizerTrial`, loads its tokenizer, and renders some conversations with the chat template."""
    pipe = OwnerPipe()
    trial = msgspec.msgpack.decode(pipe.read(), type=TokenizerTrial)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)  # of private memory, without files that libraries map
    most = round(MEMORY_GIB * (1 << 30))
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    pipe.write(Ready(""))
    pipe.read()
    with cpu_limit(LOAD_S):
        problem = _problem(lambda: load_tokenizer(Path(trial.folder)))
    pipe.write(TrialResult(problem))
    pipe.read()
    with cpu_limit(RENDER_S):
        problem = _problem(lambda: _render(trial))
    pipe.write(TrialResult(problem))


def _render(trial: TokenizerTrial) -> None:
    tokenizer = PromptTokenizer(Path(trial.folder), template_arguments=trial.arguments)
    for messages, tools in _CONVERSATIONS:
        for opens_answer in (True, False):
            try:
                tokenizer.render(messages, tools=tools, opens_answer=opens_answer)
            except ValueError as error:  # a template may refuse a conversation
                if isinstance(error.__cause__, _TOO_MUCH):
                    raise error.__cause__ from None


def _problem(work: Any) -> str:
    """Returns the error that a limit caused in a call, else "".

    The processes that use the folder report other errors.
    """
    try:
        work()
    except _TOO_MUCH as error:
        return f"{type(error).__name__} {error}".strip()
    except ValueError as error:
        causes = [f"{type(cause).__name__} {cause}".strip() for cause in _causes(error) if isinstance(cause, _TOO_MUCH)]
        return causes[0] if causes else ""
    return ""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


if __name__ == "__main__":
    main()
