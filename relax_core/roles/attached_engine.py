"""Implements the owner of an attached engine (an external server).

The owner sends weights, but does not start or end the engine.

A lock file in the user's cache folder reserves the server for one run, because two runs would overwrite each other's
weights. The kernel releases the lock when the locking process exits. The lock does not exclude runs of different users
or runs on machines that do not share this folder.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from relax_core.contracts.engine import SYNC_TIMEOUT_S, EngineError, EngineUnreachable, WeightManifest
from relax_core.contracts.private_folder import private_folder, user_cache
from relax_core.families.hf_config import has_hf_config, language_values, read_hf_config
from relax_core.registry import find_engine
from relax_core.roles.engine_directory import engine_client, member_list
from relax_core.roles.engine_owner import WATCH_S, EngineOwner
from relax_core.roles.role_context import RunContext
from relax_core.weights.version_copy import reading_copy
from relax_core.weights.version_folder import reading

WAIT_S = 10.0  # a killed process of the same run may hold the lock for this time after its kill
RETRY_S = 0.1


def marks_folder() -> Path:
    """Returns ``$XDG_CACHE_HOME/relax/servers``, by default below ``~/.cache``."""
    return user_cache("servers")


@contextmanager
def held_server(url: str, *, run_dir: Path, wait_s: float = WAIT_S) -> Iterator[None]:
    """Reserves the server at ``url`` for the run in ``run_dir`` while the block runs.

    Raises EngineError, with the name of the other run, if another process reserves the server for ``wait_s`` seconds.
    """
    parts = urlsplit(url)
    path = marks_folder() / f"{parts.hostname}-{parts.port}"
    private_folder(path.parent, key="XDG_CACHE_HOME")
    deadline = time.monotonic() + wait_s
    while (mark := _locked(path)) is None:
        if time.monotonic() > deadline:
            holder = _holder(path) or "another folder"
            raise EngineError(
                f"engine {url}: the run in {holder} holds this server. Remove it from that run, or use another server."
            )
        time.sleep(RETRY_S)
    with mark:
        mark.truncate(0)
        mark.write(f"{run_dir}\n")
        mark.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path) -> IO[str] | None:
    """Returns the open and locked file, or None if another process has the lock or has just removed the file."""
    with ExitStack() as undo:
        mark = undo.enter_context(path.open("a+"))
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if not _is(mark, path):
            return None
        undo.pop_all()
        return mark


def _is(mark: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(mark.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


LOST_AFTER_S = 30.0  # seconds without an answer after which a joined server is removed
LEAVE_S = 5.0  # time limit for a leaving engine to discard its weights


class AttachedEngineOwner(EngineOwner):
    """Owns the engine at ``engine.urls[rank]``, or an engine that joined the running run by its URL.

    If an engine of ``engine.urls`` does not answer, the owner waits until the user has restarted the engine. A joined
    engine is lost after `LOST_AFTER_S` seconds without an answer. An engine that leaves keeps running and discards its
    weights. An engine gets the newest weights before it gets prompts. If the run also started engines, this owner sends
    all weights to a joined engine. If the run publishes weights in shared memory, the owner sends them from a copy in
    the run's folder.
    """

    def media_node(self) -> str:
        """Returns "", because the clients of an attached engine send the pixels with the requests."""
        return ""

    def work(self) -> None:
        """Reserves the engine for this run, checks it, and keeps its weights up to date until the run stops."""
        joined = member_list(self.context).read().url_of(self._rank)
        url = joined or self.context.config.engine.urls[self._rank].rstrip("/")
        with held_server(url, run_dir=self.context.run_dir):
            self._own(url, joined=bool(joined))

    @contextmanager
    def _reading_newest(self) -> Iterator[WeightManifest]:
        published, shared = self.context.weights_folder, self.context.shared_weights
        if shared == published:
            with reading(published, reader=self.name) as newest:
                yield newest
            return
        deadline_s = SYNC_TIMEOUT_S
        with ExitStack() as stack:
            try:
                copied = stack.enter_context(reading_copy(published, shared, reader=self.name, deadline_s=deadline_s))
            except OSError as error:
                raise EngineError(f"the weights are not copied into {shared}: {error}") from error
            yield copied

    def _own(self, url: str, *, joined: bool) -> None:
        engine = self.context.config.engine
        self._url = url
        client = engine_client(self.context, url, attached=True)
        attach = find_engine(engine.name).attach
        assert attach is not None, "only kinds of engine with attach have engine.urls"
        attach(client, engine.start_timeout_s, self.context.config.rollout)
        if joined and (problem := fit_problem(client.server_info(), engine_needs(self.context))) is not None:
            raise EngineError(f"engine {url}: {problem}")
        self._address.set()
        answered = time.monotonic()
        while not self.stopping:
            try:
                client.ready()
                answered = time.monotonic()
                self._reconcile(client)
                self._meter.measure(client, now=time.monotonic())
            except EngineUnreachable as error:
                if joined and time.monotonic() - answered > LOST_AFTER_S:
                    message = f"it did not answer for {LOST_AFTER_S:g} s: {error}"
                    raise EngineUnreachable(message) from error
                self.set_state("waiting", str(error))
            self._stopping.wait(WATCH_S)
        if joined:
            with suppress(EngineError):  # the server may have ended; the next run attaches to it again
                attach(client, LEAVE_S, self.context.config.rollout)


# -- Compares the start settings of an external server with the run's needs -------------------------------------------

# Names of the settings in the response of /server_info: SGLang's names first, then the embedded engine's names.
SLOTS = ("max_running_requests", "max_running_samples")
TOKENS = ("max_total_num_tokens", "max_total_tokens")


@dataclass(frozen=True, kw_only=True)
class EngineNeeds:
    """Holds the run's requirements for each engine.

    ``vocabulary`` is the size of the model's vocabulary. ``sample_tokens`` is the largest number of prompt and response
    tokens of one sample. ``slots`` is the number of samples of a group; an engine decodes all samples of a group
    together.
    """

    vocabulary: int
    sample_tokens: int
    slots: int


def engine_needs(context: RunContext) -> EngineNeeds:
    """Returns this run's requirements for each engine."""
    return EngineNeeds(
        vocabulary=language_values(read_hf_config(context.model_folder))["vocab_size"],
        sample_tokens=context.config.engine.context_tokens,
        slots=context.config.algo.group_size,
    )


def fit_problem(info: Mapping[str, Any], needs: EngineNeeds) -> str | None:
    """Returns the reason why a server does not meet the run's requirements, or None.

    ``info`` contains the server's start settings. Missing settings are not compared. A wrong vocabulary is also
    detected later, by the probe.
    """
    vocabulary = _vocabulary(info)
    if vocabulary is not None and vocabulary != needs.vocabulary:
        return (
            f"its model {info['model_path']} has {vocabulary} tokens in its vocabulary, and the run's has "
            f"{needs.vocabulary}. Start it with the run's model."
        )
    told = {
        "samples of one group at once": (_least(info, SLOTS), needs.slots),
        "tokens of one sample in its context": (_least(info, ("context_length",)), needs.sample_tokens),
        "tokens of one sample in its cache": (_least(info, TOKENS), needs.sample_tokens),
    }
    for what, (has, needed) in told.items():
        if has is not None and has < needed:
            return f"it takes {has} {what}, and the run needs {needed}. Start it with {needed} or more."
    return None


def _least(info: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """Returns the smallest number among these settings, or None without a number."""
    return min((info[name] for name in names if isinstance(info.get(name), int)), default=None)


def _vocabulary(info: Mapping[str, Any]) -> int | None:
    """Returns the vocabulary size of the server's model, or None if its folder is not on this machine."""
    folder = Path(str(info.get("model_path", "")))
    return int(language_values(read_hf_config(folder))["vocab_size"]) if has_hf_config(folder) else None
