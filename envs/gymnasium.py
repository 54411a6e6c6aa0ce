"""Plays environments of the package gymnasium as text, such as FrozenLake-v1; actions are numbers or names."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_core.contracts.env import Action, BaseInteractionEnv, EnvSpec, EpisodeStart, IsolatedConfig, StepResult

_COLOUR = re.compile("\x1b\\[[1-9][0-9;]*m")  # the terminal code before coloured text
_NUMBER_BEGINS = r"(?<![-+−])(?<!\d\.)"  # the action 1 must not be found in -1 and 2.1
_KEY_CHARACTERS = 64  # longest key of a state; a digest of a longer value has this length
_COLOUR_ENDS = re.compile("\x1b\\[0m")


@dataclass(frozen=True)
class GymnasiumConfig(IsolatedConfig):
    """Holds the settings of the adapter.

    ``id`` names the environment, and ``arguments`` are the arguments of ``gymnasium.make``. ``actions`` are the names
    of the actions 0, 1, …; without names the model answers with a number.
    """

    name: str = "gymnasium"
    id: str = "FrozenLake-v1"
    arguments: dict[str, Any] = field(default_factory=dict)
    actions: list[str] = field(default_factory=list)
    max_turns: int = 20
    tool_parser: str = "none"


class GymnasiumEnv(BaseInteractionEnv):
    """Plays one episode. The last action in a response is taken; a response without an action is answered by a hint.

    If the environment has the render mode "ansi", an observation is this text picture, with brackets around coloured
    text. Otherwise it is the observation's value as JSON. This value, or the digest of a long value, is also the key of
    the state. Randomness in the reset is from the group's seed, and later randomness is from the episode's seed.
    """

    def __init__(self, start: EpisodeStart, config: GymnasiumConfig) -> None:
        import gymnasium

        modes = gymnasium.make(config.id, **config.arguments).metadata.get("render_modes", [])
        self._draws = "ansi" in modes
        arguments = {"render_mode": "ansi", **config.arguments} if self._draws else config.arguments
        self._env = gymnasium.make(config.id, **arguments)
        space = self._env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"env.id={config.id}: its actions are {space}. Only numbered actions are supported.")
        self._first, count = int(space.start), int(space.n)
        if config.actions and len(config.actions) != count:
            raise ValueError(
                f"env.actions has {len(config.actions)} names, but env.id={config.id} has {count} actions."
            )
        self._names = config.actions or [str(self._first + number) for number in range(count)]
        named = "|".join(_NUMBER_BEGINS * name[:1].isdigit() + re.escape(name) for name in self._names)
        self._pattern = re.compile(rf"(?<!\w)({named})(?!\w|\.\d)", re.IGNORECASE)
        self._start = start
        self._state = ""

    def reset(self) -> str:
        """Returns the first observation and the possible actions."""
        import numpy as np

        observation, _ = self._env.reset(seed=self._start.group_seed % 2**31)
        self._env.unwrapped.np_random = np.random.default_rng(self._start.episode_seed)
        return f"{self._text(observation)}\nAnswer with one of: {', '.join(self._names)}"

    def step(self, action: Action) -> StepResult:
        """Returns the next observation with the reward."""
        found = self._pattern.findall(action.content or action.text)
        before = self._state
        if not found:
            message = f"There is no action in your answer. Answer with one of: {', '.join(self._names)}"
            return StepResult(observation=message, state_key=before)
        number = [name.lower() for name in self._names].index(found[-1].lower())
        observation, reward, terminated, truncated, _ = self._env.step(self._first + number)
        return StepResult(
            observation=self._text(observation),
            reward=float(reward),
            done=bool(terminated or truncated),
            info={"truncated": int(truncated)},
            state_key=before,
        )

    def close(self) -> None:
        """Closes the environment."""
        self._env.close()

    def _text(self, observation: Any) -> str:
        text = _value_text(observation)
        self._state = text if len(text) <= _KEY_CHARACTERS else hashlib.sha256(text.encode()).hexdigest()
        if not self._draws:
            return text
        return _COLOUR_ENDS.sub("]", _COLOUR.sub("[", str(self._env.render()))).strip("\n")


def _value_text(value: Any) -> str:
    """Returns the whole value as text: plain numbers, arrays as lists, JSON where possible."""
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False, default=str)


def _plain(value: Any) -> Any:
    """Converts a value of a space to plain Python: NumPy arrays, NumPy numbers and named tuples are converted."""
    if hasattr(value, "tolist"):
        short = value.dtype.kind == "f" and value.dtype.itemsize < 8  # 0.1 and not 0.10000000149011612
        return (value.astype(str).astype(float) if short else value).tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):  # for example, of a graph space
        return _plain(value._asdict())
    return [_plain(element) for element in value] if isinstance(value, list | tuple) else value


def check(config: GymnasiumConfig) -> None:
    """Raises ValueError if the package or the environment is missing."""
    if importlib.util.find_spec("gymnasium") is None:
        raise ValueError("env=gymnasium needs the package gymnasium: pip install 'relax-core[envs]'.")
    import gymnasium

    try:
        module, found, name = config.id.rpartition(":")  # gymnasium.make imports the module before the colon
        if found:
            importlib.import_module(module)
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise ValueError(f"env.id={config.id}: {error}") from error
    except Exception as error:  # the user's module may raise any error
        message = f"{type(error).__name__}: {error}"
        raise ValueError(f"env.id={config.id}: the module {module} cannot be imported: {message}") from error


SPEC = EnvSpec(
    name="gymnasium",
    summary="environments of the package gymnasium with numbered actions, as text",
    config=GymnasiumConfig,
    open=GymnasiumEnv,
    check=check,
    isolated=True,
    state_keys=True,
)
