"""Is the program of a sink's process: it takes calls from its standard input until that ends, and answers each one."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from pathlib import Path

from relax_core.contracts.sink import BaseSink, SinkStart
from relax_core.observe.trackers.sink_calls import SinkCall, framed_answer, read_call
from relax_core.registry import find_sink, short_name

PARENT_S, LEFT_S = 1.0, 20.0  # between two looks at the parent, and to end after it has gone


def main() -> None:
    """Answers calls. What a library prints goes to the standard error, because answers have the standard output."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True, name="parent").start()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    sink: BaseSink | None = None
    while (call := read_call(sys.stdin.buffer)) is not None:
        error = ""
        try:
            sink = _run(call, sink)
        except Exception as failure:  # whatever a sink raises is told to the service, and the next call is tried
            traceback.print_exc()
            error = f"{type(failure).__name__}: {failure}"
        try:
            answers.write(framed_answer(error))
        except BrokenPipeError:  # the service has died or given this process up
            break
    if sink is not None:
        sink.close()


def _run(call: SinkCall, sink: BaseSink | None) -> BaseSink | None:
    if call.call == "open":
        from relax_core.config.plugin_types import plugin_config  # OmegaConf, which no other part of this folder needs

        values = plugin_config("sink", call.plugin, call.values, section=f"tracker.sinks.{short_name(call.plugin)}")
        return find_sink(call.plugin).open(SinkStart(run_dir=Path(call.run_dir)), values)
    assert sink is not None, "the service opens the sink first"
    match call.call:
        case "write":
            sink.write(call.batch())
        case "flush":
            sink.flush()
        case "close":
            sink.close()
            return None
    return sink


def _end_with_parent(parent: int) -> None:
    """Ends this process a while after the service has died, also if its sink hangs."""
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    time.sleep(LEFT_S)
    os._exit(1)


if __name__ == "__main__":
    main()
