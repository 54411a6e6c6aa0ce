"""Lets one sender at a time change the weights of an SGLang server."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from urllib.parse import quote

from relax_core.contracts.engine import EngineError, EngineUnreachable

BUSY_S = 0.05  # seconds between two looks at whether another sender has ended


class SenderLock:
    """Is a lock on a file beside the versions, which every sender to the server at ``url`` sees, on any host.

    SGLang has no lock of its own: a sender that lets the server go on lets it go on in another one's update too, which
    then waits for all running samples. The system gives the lock back when its holder's process ends. A holder may be
    stopped, so nobody waits longer than ``timeout_s`` seconds.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._file: int | None = None

    def take(self, folder: Path) -> None:
        """Takes the lock in the folder of the versions; one that this sender still holds is given back before.

        Raises EngineUnreachable if another sender keeps it, and EngineError if the folder takes no file.
        """
        self.give_back()
        deadline = time.monotonic() + self._timeout_s
        try:
            file = os.open(folder / f"sending-{quote(self._url, safe='')}", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:  # the disk is full, or the run's folder was removed
            raise EngineError(f"engine {self._url}: weights cannot be sent: {error}") from error
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(file)
                    raise EngineUnreachable(
                        f"engine {self._url}: another sender has been sending weights for {self._timeout_s:.0f} s"
                    ) from None
            except OSError as error:
                os.close(file)
                raise EngineError(f"engine {self._url}: {folder} has no locks of files (flock): {error}") from error
            time.sleep(BUSY_S)
        self._file = file

    def give_back(self) -> None:
        """Lets the next sender go on; does nothing if this sender does not hold the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
