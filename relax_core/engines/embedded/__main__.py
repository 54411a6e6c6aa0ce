"""Runs one embedded engine process: ``python -m relax_core.engines.embedded``.

When the process is ready, it prints one line of JSON to stdout: {"url", "pid", "port"}. It ends on SIGTERM. Without
--stay it also ends when its stdin is closed, so it never outlives its parent process. If the command line or the
model's folder is wrong, it exits with code 2 and one line on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import ipaddress
import json
import os
import socket
import sys
import threading
from pathlib import Path

from relax_core.engines.held_port import listening_socket, url_of

DTYPES = ("float32", "bfloat16")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m relax_core.engines.embedded", description=__doc__)
    parser.add_argument("--model-path", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--family", help="a model family, by name or file, in addition to the built-in families")
    parser.add_argument("--media-folder", type=Path, help="folder of the images and videos that requests name")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--beyond-loopback", action="store_true", help="allow a --host that other machines can reach")
    parser.add_argument("--port", type=int, default=0, help="0 takes any free port")
    parser.add_argument("--listener", type=int, help="descriptor of a listening socket, instead of --port")
    parser.add_argument("--token-file", type=Path, required=True, help="file with the bearer token")
    parser.add_argument("--max-running-samples", type=int, default=256)
    parser.add_argument("--max-total-tokens", type=int, default=65536, help="tokens in the KV cache")
    parser.add_argument("--context-length", type=int, default=512, help="prompt and response tokens of one sample")
    parser.add_argument("--prefix-cache-tokens", type=int, default=0, help="tokens kept of samples that have ended")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--load-weights", action="store_true", help="serve the folder's own weights at once")
    parser.add_argument("--stay", action="store_true", help="keep running when stdin is closed, as a standalone server")
    parser.add_argument("--weight-version", type=int, default=0, help="the version of --load-weights")
    return parser.parse_args(argv)


def _listener(host: str, port: int, *, inherited: int | None, beyond_loopback: bool) -> socket.socket:
    """Returns the listening socket from the parent process, or a new socket that listens on the port."""
    if not beyond_loopback and host != "localhost" and not ipaddress.ip_address(host).is_loopback:
        raise ValueError(f"--host {host}: not a loopback address; give 127.0.0.1, or add --beyond-loopback")
    if inherited is not None:
        return socket.socket(fileno=inherited)
    try:
        return listening_socket(host, port)
    except OSError as error:
        raise ValueError(
            f"--port {port} on {host}: {error.strerror}; end the process that has it, or choose another port"
        ) from error


def _end_with_stdin() -> None:
    """Ends the process as soon as its stdin is closed, because the parent process has ended."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="owner", daemon=True).start()


def main(argv: list[str] | None = None) -> int:
    """Serves until the process is stopped; returns the exit code."""
    arguments = _arguments(argv)
    if not arguments.stay:
        _end_with_stdin()
    try:
        listener = _listener(
            arguments.host, arguments.port, inherited=arguments.listener, beyond_loopback=arguments.beyond_loopback
        )
        gc.disable()  # garbage collections would take a fifth of the imports' time and free almost nothing
        from relax_core.engines.embedded.assembly import build_app, read_token, serve

        gc.freeze()
        gc.enable()
        token = read_token(arguments.token_file)
        app, scheduler = build_app(arguments, token=token)
    except (ValueError, OSError) as error:
        print(f"embedded engine: {error}", file=sys.stderr, flush=True)
        return 2
    ready = json.dumps({"url": url_of(listener), "pid": os.getpid(), "port": listener.getsockname()[1]})
    gc.collect()
    gc.freeze()  # excludes objects of the start-up from later garbage collections
    with asyncio.Runner(loop_factory=_event_loop) as runner:
        runner.run(serve(app, scheduler, listener, token=token, ready=ready))
    return 0


def _event_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


if __name__ == "__main__":
    sys.exit(main())
