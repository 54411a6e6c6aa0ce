"""`relax dashboard [FOLDER ...]` serves a web page about the runs in these folders on this machine, until Ctrl-C.

A folder is a run's folder or contains runs. The default is ./runs. The page only reads the folders. It works for runs
that are live, ended or crashed, and for copied run folders.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import getpass
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from relax_core.observe.standard_streams import unread_streams
from relax_core.server.run_folders import find_runs

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 7788, 50


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="relax dashboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="*", type=Path, default=[Path("runs")], help="run folders, or folders of runs")
    parser.add_argument("--port", type=int, help=f"by default the first free port from {FIRST_PORT} on")
    given = parser.parse_args(arguments)
    if given.port is not None and not 0 <= given.port <= 65535:
        print(f"relax dashboard: --port={given.port}: use 0 to 65535; 0 selects a free port.", file=sys.stderr)
        return 2
    for folder in given.folder:
        if not folder.is_dir():
            print(f"relax dashboard: {folder} is not a folder. Give a run folder or a folder of runs.", file=sys.stderr)
            return 2
    if not find_runs(given.folder):
        listed = ", ".join(map(str, given.folder))
        print(f"relax dashboard: no run in {listed} yet; the page will show new runs.", file=sys.stderr)
    try:
        listener = _listener(given.port)
    except OSError as error:
        print(f"relax dashboard: port {given.port or FIRST_PORT}: {error.strerror}. Use --port=0.", file=sys.stderr)
        return 2
    with listener:
        return _serve(given.folder, listener)


def _listener(port: int | None) -> socket.socket:
    """Returns a socket bound to loopback, by default to the first free port."""
    ports = [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + PORTS), 0]
    for candidate in ports[:-1]:
        try:
            return socket.create_server((LOOPBACK, candidate))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return socket.create_server((LOOPBACK, ports[-1]))


def _serve(folders: Sequence[Path], listener: socket.socket) -> int:
    from relax_core.server.http_server import HttpServer
    from relax_core.server.page_routes import Page, page_app
    from relax_core.server.request_guard import RequestGuard, Session
    from relax_core.server.run_reader import cache_folder

    port = listener.getsockname()[1]
    session = Session()

    def print_link() -> None:
        print(f"http://{LOOPBACK}:{port}/#token={session.link_token}", flush=True)

    def print_next_link() -> None:
        print("The link was used and is no longer valid. Link for another browser:", flush=True)
        print_link()

    page = Page(folders, cache=cache_folder(), session=session, on_exchange=print_next_link)
    print("The page is at this link, which works once. Ctrl-C ends it.", flush=True)
    print_link()
    host = f"{getpass.getuser()}@{socket.gethostname()}"
    print(f"From another machine, first: ssh -L {port}:{LOOPBACK}:{port} {host}", flush=True)
    try:
        asyncio.run(HttpServer(RequestGuard(page_app(page), session, port=lambda: port)).serve(listener))
    except KeyboardInterrupt:  # uvicorn has already closed the connections
        pass
    finally:
        page.close()
    return 0


if __name__ == "__main__":
    with unread_streams():
        sys.exit(main())
