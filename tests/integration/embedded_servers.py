"""Starts embedded engines as external servers. A run attaches to them by address."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

KEY = "key-of-the-servers"
SIZES = ("--context-length", "64", "--max-running-samples", "16", "--max-total-tokens", "4096")


def server_command(
    model: Path, folder: Path, *more: str, module: Sequence[str] = ("relax_core.engines.embedded",)
) -> list[str]:
    """Returns the command of a server. Its key is in ``folder``. The server keeps running without standard input."""
    own = ["--stay", "--model-path", str(model), "--token-file", str(folder / "key"), *SIZES, *more]
    return [sys.executable, "-m", *module, *own]


@contextmanager
def servers(folder: Path, commands: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Starts servers and yields their addresses by command name. Their key is in ``folder``."""
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text(KEY)
    with ExitStack() as stack:
        urls = {}
        for name, command in commands.items():
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            urls[name] = json.loads(process.stdout.readline())["url"]
        yield urls


def attached_to(url: str, folder: Path) -> list[str]:
    """Returns the overrides of a run that starts with the server at ``url``. The server's key is in ``folder``."""
    return [f"engine.urls=[{url}]", f"engine.token_file={folder / 'key'}", "run.save_every=0"]
