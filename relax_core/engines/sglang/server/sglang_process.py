"""SGLang's server as a process of ours: a script for the interpreter of SGLang's own environment.

    RELAX_ENGINE_SCRATCH=FOLDER python -P sglang_process.py --token-file FILE --port 0 [flags of sglang.launch_server]

It takes the token from the file, so that no command line has it, tells address and pid on stdout once it serves, keeps
to the folder (scratch.py), and ends with all its processes when its stdin does. SGLang starts its own processes by
running this file again as their main module: what stands at the end without a guard is for all of them.
"""

from __future__ import annotations

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

ROOT = Path(__file__).resolve().parents[4]
ON_CPU = "SGLANG_USE_CPU_ENGINE"
TOKEN_FILE = "RELAX_ENGINE_TOKEN_FILE"
CHILDREN_GONE_S = 3.0  # less than the owner waits before it kills this process too


class OurPackageAlone(MetaPathFinder):
    """Finds relax_core, and nothing else that lies beside it: SGLang's environment has versions of its own."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "relax_core":
            return None
        folder = ROOT / fullname
        return importlib.util.spec_from_file_location(
            fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def hide_token_in_logs(token: str) -> None:
    """SGLang logs its whole configuration, the key with it."""
    make = logging.getLogRecordFactory()

    def censored(*arguments: object, **keywords: object) -> logging.LogRecord:
        record = make(*arguments, **keywords)
        text = record.getMessage()
        if token in text:
            record.msg, record.args = text.replace(token, "***"), ()
        return record

    logging.setLogRecordFactory(censored)


def keep_to_the_given_host() -> None:
    """torch's store of a process group listens on every interface and asks nobody for a token: here on its own host."""
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
    """What every process of the server needs before it imports sglang."""
    sys.meta_path.append(OurPackageAlone())
    from relax_core.engines.sglang.server import scheduler_changes, scratch

    scratch.keep_to_scratch(Path(os.environ[scratch.VARIABLE]))
    scheduler_changes.install()
    hide_token_in_logs(Path(os.environ[TOKEN_FILE]).read_text().strip())
    keep_to_the_given_host()
    if os.environ.get(ON_CPU) == "1":
        from relax_core.engines.sglang.cpu.shims import install

        install()


def end_with_stdin() -> None:
    """Waits for the owner's end of the pipe to close; then ends the server's processes and this one."""
    while os.read(0, 4096):
        pass
    from relax_core.engines.sglang.server import scratch

    try:
        end_children()
        scratch.remove_scratch(Path(os.environ[scratch.VARIABLE]))
    finally:
        os._exit(0)


def end_children() -> None:
    """Also those that the main thread starts meanwhile."""
    import psutil

    deadline = time.monotonic() + CHILDREN_GONE_S
    while (children := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=CHILDREN_GONE_S)


def free_port(host: str) -> int:
    """SGLang takes no open socket, so between this and its own bind another process may take the port."""
    with socket.create_server((host, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def main(arguments: list[str]) -> None:
    from importlib.metadata import version

    from relax_core.engines.sglang.version import version_problem

    if (problem := version_problem(version("sglang"))) is not None:
        sys.exit(problem)
    ready = os.dup(1)
    os.dup2(2, 1)  # whatever SGLang prints goes to the log
    threading.Thread(target=end_with_stdin, name="life-line", daemon=True).start()

    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(arguments)
    server_args.api_key = Path(os.environ[TOKEN_FILE]).read_text().strip()
    if server_args.port == 0:
        server_args.port = free_port(server_args.host)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # until the server has a handler of its own

    def tell() -> None:
        line = {"url": f"http://{server_args.host}:{server_args.port}", "pid": os.getpid(), "port": server_args.port}
        os.write(ready, json.dumps(line).encode() + b"\n")

    launch_server(server_args, launch_callback=tell)


def start() -> None:
    """The server's own main process: its environment is that of all its processes."""
    place = sys.argv.index("--token-file")
    os.environ[TOKEN_FILE] = os.path.abspath(sys.argv[place + 1])
    import torch

    if not torch.cuda.is_available():
        os.environ[ON_CPU] = "1"
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it would compile one small function of the sampler for many seconds
    prepare_process()
    arguments = sys.argv[1:place] + sys.argv[place + 2 :]
    if os.environ.get(ON_CPU) == "1":
        from relax_core.engines.sglang.cpu.flags import CPU_FLAGS

        arguments = [*CPU_FLAGS, *arguments]
    main(arguments)


if __name__ == "__main__":
    start()
elif __name__ == "__mp_main__":
    prepare_process()
