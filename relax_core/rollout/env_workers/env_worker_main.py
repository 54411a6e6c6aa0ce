"""The worker process of an isolated env: ``python -m relax_core.rollout.env_workers.env_worker_main NAME``.

`EnvWorkers` starts this module as a child process. The process answers one request at a time. Therefore an env's draws
from the global random states depend only on the env's episode.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import inspect
from typing import Any

import msgspec

from relax_core.contracts.child_process import OwnerPipe, Ready, cpu_limit
from relax_core.contracts.env import BaseInteractionEnv, EnvSpec, EpisodeStart, StepResult
from relax_core.contracts.plugin_results import WrongResult
from relax_core.contracts.untrusted_values import clean_text, shown_error
from relax_core.registry import find_env, plugin_error_text
from relax_core.rollout.env_workers.env_messages import (
    Close,
    Closed,
    EnvAnswer,
    EnvRequest,
    Failed,
    Open,
    Opened,
    Settings,
    Step,
    Stepped,
    with_sources,
)
from relax_core.rollout.env_workers.random_states import RandomStates

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclasses.dataclass(frozen=True)
class _Episode:
    """Holds an open env with its random states."""

    env: BaseInteractionEnv
    states: RandomStates


class _OpenEpisodes:
    """Holds the open episodes of this process by number, and answers requests for these episodes."""

    def __init__(self, spec: EnvSpec, config: Any, runner: asyncio.Runner) -> None:
        assert spec.open is not None
        self._open = spec.open
        self._config = config
        self._runner = runner
        self._episodes: dict[int, _Episode] = {}

    def answer(self, request: EnvRequest) -> EnvAnswer:
        """Returns the answer to a request; an exception of the env becomes `Failed`."""
        try:
            if isinstance(request, Open):
                return self._begin(request)
            if isinstance(request, Step):
                return self._step(request)
            return self._close(request)
        except WrongResult as error:
            return Failed(message=clean_text(str(error)), wrong_result=True)
        except Exception as error:  # plug-in code: the parent process ends or restarts the episode
            return Failed(message=plugin_error_text(error))

    def _begin(self, request: Open) -> Opened:
        start: EpisodeStart = dataclasses.replace(request.start, row=with_sources(request.start.row))
        states = RandomStates(start.group_seed)
        with states.current():
            env = self._open(start, self._config)
            self._episodes[request.episode] = _Episode(env, states)
            messages = self._result(env.format_observation(self._result(env.reset())))
        states.reseed(start.episode_seed)
        return Opened(messages=messages)

    def _step(self, request: Step) -> Stepped:
        episode = self._episodes[request.episode]
        messages = None
        with episode.states.current():
            step: StepResult = self._result(episode.env.step(request.action))
            if not step.done and step.context_edit is None:
                messages = self._result(episode.env.format_observation(step.observation))
        return Stepped(
            messages=messages,
            reward=step.reward,
            done=step.done,
            info=dict(step.info),
            state_key=step.state_key,
            context_edit=None if step.context_edit is None else list(step.context_edit),
        )

    def _close(self, request: Close) -> Closed:
        episode = self._episodes.pop(request.episode, None)
        if episode is not None:
            with episode.states.current():
                self._result(episode.env.close())
        return Closed()

    def _result(self, returned: Any) -> Any:
        return self._runner.run(_awaited(returned)) if inspect.isawaitable(returned) else returned


async def _awaited(returned: Any) -> Any:
    return await returned


def main() -> None:
    """Reads the settings, imports the env and answers requests until stdin ends."""
    pipe = OwnerPipe()
    # An orphaned process of an env becomes a child of this process. The parent process then finds and kills it.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    settings = msgspec.msgpack.decode(pipe.read(), type=Settings)
    try:
        spec = find_env(settings.env)
        config: Any = msgspec.msgpack.decode(settings.config, type=spec.config)
    except Exception as error:  # plug-in code: the parent process reports the error to the user
        pipe.write(Ready(shown_error(error)))
        raise
    pipe.write(Ready(""))
    with asyncio.Runner() as runner:
        episodes = _OpenEpisodes(spec, config, runner)
        while True:
            request = msgspec.msgpack.decode(pipe.read(), type=EnvRequest)
            with cpu_limit(config.step_timeout_s):
                answer = episodes.answer(request)
            try:
                pipe.write(answer)
            except TypeError as error:  # nothing was written
                pipe.write(
                    Failed(
                        message=f"env {spec.name}: a message or info has a non-JSON value: {error}", wrong_result=True
                    )
                )
            except (ValueError, OverflowError, RecursionError) as error:  # an unsupported value; nothing was written
                pipe.write(Failed(message=f"env {spec.name}: a message or info cannot be sent: {shown_error(error)}"))


if __name__ == "__main__":
    main()
