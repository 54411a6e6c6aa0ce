"""Starts the engines of an evaluation: processes that serve a folder's own weights, without Ray."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.engine import EngineError
from relax_core.engines.build_client import build_client
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import EngineClient

STOP_S = 5.0


class EvalEngine:
    """Holds an engine process and its client."""

    def __init__(self, process: EngineProcess, client: EngineClient, *, log_file: Path) -> None:
        self._process = process
        self._client = client
        self._log_file = log_file

    def client(self) -> EngineClient:
        """Returns the client. Raises EngineError if the process has ended, because nothing restarts it."""
        code = self._process.poll()
        if code is not None:
            raise EngineError(f"an engine process ended with {code}; see {self._log_file}")
        return self._client

    async def aclose(self) -> None:
        """Closes the client's connections."""
        await self._client.aclose()
        self._client.close()


@contextmanager
def eval_engines(
    config: RelaxConfig, model_folder: Path, *, log_dir: Path, media_folder: Path | None = None
) -> Iterator[list[EvalEngine]]:
    """Starts ``engine.count`` engines at the same time and stops them after the block.

    ``media_folder`` holds the images and videos of prompts, None if there are none. Raises EngineError if one of the
    engines does not start.
    """
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="rlx-eval-")))
        token_file = folder / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(secrets.token_hex(32), encoding="utf-8")
        port = config.engine.port
        launches = [
            EngineLaunch(
                model_folder=model_folder,
                family=config.model.family,
                engine=config.engine,
                dtype=config.engine.dtype or config.model.dtype,
                token_file=token_file,
                log_file=log_dir / f"engine-{number}.log",
                port=port + number if port else 0,
                load_weights=True,
                stop_strings=bool(config.rollout.stop),
                media_folder=media_folder,
                shard_media=config.parallel.shard_media,
            )
            for number in range(config.engine.count)
        ]
        with ThreadPoolExecutor(len(launches)) as threads:
            starts = [threads.submit(EngineProcess.start, launch) for launch in launches]
            for start in starts:
                if start.exception() is None:
                    undo.callback(start.result().stop, timeout_s=STOP_S)
        processes = [start.result() for start in starts]
        yield [
            EvalEngine(
                process,
                build_client(
                    config.engine,
                    process.url,
                    model_folder=model_folder,
                    token_file=token_file,
                    media_folder=media_folder,
                ),
                log_file=launch.log_file,
            )
            for process, launch in zip(processes, launches, strict=True)
        ]
