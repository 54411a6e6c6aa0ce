"""Lets one sender at a time change the weights of an SGLang server."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

from relax_core.contracts.engine import EngineError, EngineUnreachable
from relax_core.contracts.host.file_lock import file_locked


class SenderLock:
    """Is a lock on a file beside the versions, which every sender to the server at ``url`` sees, on any host.

    SGLang has no lock of its own: a sender that lets the server go on lets it go on in another one's update too, which
    then waits for all running samples. The kernel releases the lock when its holder's process ends. A holder may be
    stopped, so no sender waits longer than ``timeout_s`` seconds.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._held = ExitStack()

    def take(self, folder: Path) -> None:
        """Takes the lock in the folder of the versions; one that this sender still holds is given back before.

        Raises EngineUnreachable if another sender keeps it, and EngineError if the folder takes no file or no lock.
        """
        self.give_back()
        path = folder / f"sending-{quote(self._url, safe='')}"
        try:
            self._held.enter_context(file_locked(path, deadline_s=self._timeout_s, makes="a weight update"))
        except TimeoutError:
            raise EngineUnreachable(
                f"engine {self._url}: another sender has been sending weights for {self._timeout_s:.0f} s"
            ) from None
        except OSError as error:  # the disk is full, the run's folder was removed, or its file system has no flock
            raise EngineError(f"engine {self._url}: weights cannot be sent: {error}") from error

    def give_back(self) -> None:
        """Lets the next sender go on; does nothing if this sender does not hold the lock."""
        self._held.close()
