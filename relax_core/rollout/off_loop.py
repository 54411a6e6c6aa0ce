"""Runs long computations beside the event loop of a rollout, which answers engines and agents meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")
_THREADS = ThreadPoolExecutor(1, thread_name_prefix="large text")  # a second one would take a core from the engine


async def off_loop(large: bool, work: Callable[[], Result]) -> Result:
    """Returns what ``work`` returns, and raises what it raises; it runs in a thread if it is ``large``.

    ``work`` must not touch what the event loop changes meanwhile. One large piece of work runs at a time.
    """
    if not large:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
