"""Runs SGLang's server as an engine process. This script runs in the interpreter of SGLang's environment.

    RELAX_ENGINE_SCRATCH=FOLDER python -P sglang_process.py --token-file FILE --listener N [flags of launch_server]

The script reads the token from FILE, because a command line is visible to other users. It serves from the listening
socket with descriptor N, which it inherits from the engine owner; without --listener it opens --port. When it serves,
it prints address and pid to stdout. It keeps its files in FOLDER (scratch.py). When its stdin is closed, it ends all
its processes and exits. SGLang starts its child processes by running this file again as the main module
``__mp_main__``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

TESTED = "0.5.23"
FROM, BEFORE = (0, 5, 23), (0, 6)  # earlier versions lack /begin_weight_update and weight versions per token


def version_problem(found: str) -> str | None:
    """Returns why this version is refused, or None. Ignores suffixes such as .post1 or rc2."""
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:3] if part.isdecimal())
    if FROM <= numbers < BEFORE:
        return None
    return (
        f"SGLang {found} is not supported. Install {TESTED}, which is tested; versions from "
        f"{'.'.join(map(str, FROM))} to before {'.'.join(map(str, BEFORE))} are accepted."
    )


ROOT = Path(__file__).resolve().parents[3]
ON_CPU = "SGLANG_USE_CPU_ENGINE"
TOKEN_FILE = "RELAX_ENGINE_TOKEN_FILE"
CHILDREN_END_S = 3.0  # shorter than the time after which the engine owner kills this process


class OurPackageAlone(MetaPathFinder):
    """Finds relax_core but no other package of Relax's environment, because SGLang's environment has other versions."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of relax_core, and None for every other module."""
        if fullname != "relax_core":
            return None
        folder = ROOT / fullname
        return importlib.util.spec_from_file_location(
            fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def hide_token_in_logs(token: str) -> None:
    """Replaces the token by *** in all log records, because SGLang logs its whole configuration, including the key."""
    make = logging.getLogRecordFactory()

    def censored(*arguments: object, **keywords: object) -> logging.LogRecord:
        record = make(*arguments, **keywords)
        text = record.getMessage()
        if token in text:
            record.msg, record.args = text.replace(token, "***"), ()
        return record

    logging.setLogRecordFactory(censored)


def keep_to_the_given_host() -> None:
    """Makes torch's store of a process group listen only on the given host.

    By default the store listens on every interface, without authentication.
    """
    from torch.distributed import TCPStore

    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    join = rendezvous._create_c10d_store

    def on_its_host(hostname: str, port: int, rank: int, *arguments: Any, **keywords: Any) -> Any:
        if rank != 0 or port == 0:
            return join(hostname, port, rank, *arguments, **keywords)
        world_size, timeout = arguments[:2]
        listener = socket.create_server((hostname, port)).detach()
        return TCPStore(hostname, port, world_size, is_master=True, timeout=timeout, master_listen_fd=listener)

    rendezvous._create_c10d_store = on_its_host


def prepare_process() -> None:
    """Prepares a process of the server. Every process calls this before importing sglang."""
    sys.meta_path.append(OurPackageAlone())
    from relax_core.engines.sglang import scratch, sglang_patches

    scratch.keep_to_scratch(Path(os.environ[scratch.VARIABLE]))
    sglang_patches.install()
    hide_token_in_logs(Path(os.environ[TOKEN_FILE]).read_text().strip())
    keep_to_the_given_host()
    if os.environ.get(ON_CPU) == "1":
        sglang_patches.install_on_cpu()


def end_with_stdin() -> None:
    """Waits until stdin is closed, then ends the child processes of the server and this process."""
    while os.read(0, 4096):
        pass
    from relax_core.engines.sglang import scratch

    try:
        end_children()
        scratch.remove_scratch(Path(os.environ[scratch.VARIABLE]))
    finally:
        os._exit(0)


def end_children() -> None:
    """Kills all child processes, including processes that the main thread starts at the same time."""
    import psutil

    deadline = time.monotonic() + CHILDREN_END_S
    while (children := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=CHILDREN_END_S)


def serve_from(listener: socket.socket, *, token: str, ready: int) -> None:
    """Makes SGLang's HTTP server serve from ``listener``, and prove to clients that it knows the token.

    The server writes an empty line to the descriptor ``ready`` when it accepts connections, because SGLang connects to
    itself before it is ready.
    """
    import uvicorn

    from relax_core.engines.protocol.server_proof import ServerProof

    run = uvicorn.Server.run

    def run_from(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        server.config.app = ServerProof(server.config.app, token=token)
        os.write(ready, b"\n")
        run(server, sockets=[listener])

    uvicorn.Server.run = run_from  # type: ignore[method-assign, assignment]


def main(arguments: list[str], *, inherited: int | None) -> None:
    """Runs SGLang's server with SGLang's flags until the server ends. ``inherited`` is the listener's descriptor."""
    from importlib.metadata import version

    from relax_core.engines.held_port import listening_socket, url_of

    if (problem := version_problem(version("sglang"))) is not None:
        sys.exit(problem)
    ready = os.dup(1)
    os.dup2(2, 1)  # redirects SGLang's output on stdout to the log
    threading.Thread(target=end_with_stdin, name="owner", daemon=True).start()

    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(arguments)
    server_args.api_key = Path(os.environ[TOKEN_FILE]).read_text().strip()
    if inherited is not None:
        listener = socket.socket(fileno=inherited)
    else:
        listener = listening_socket(server_args.host, server_args.port)
    server_args.port = listener.getsockname()[1]
    serve_from(listener, token=server_args.api_key, ready=ready)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # until the server installs a handler

    def print_ready() -> None:
        line = {"url": url_of(listener), "pid": os.getpid(), "port": server_args.port}
        os.write(ready, json.dumps(line).encode() + b"\n")

    launch_server(server_args, launch_callback=print_ready)


def start() -> None:
    """Starts the server's main process. All its child processes inherit the environment that is set here."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--token-file", required=True)
    parser.add_argument("--listener", type=int)
    own, arguments = parser.parse_known_args()
    os.environ[TOKEN_FILE] = os.path.abspath(own.token_file)
    import torch

    if not torch.cuda.is_available():
        os.environ[ON_CPU] = "1"
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # avoids compiling a small function of the sampler for many seconds
    prepare_process()
    if os.environ.get(ON_CPU) == "1":
        from relax_core.engines.sglang.sglang_patches import CPU_FLAGS

        arguments = [*CPU_FLAGS, *arguments]
    main(arguments, inherited=own.listener)


if __name__ == "__main__":
    start()
elif __name__ == "__mp_main__":
    prepare_process()
