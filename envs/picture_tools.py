"""An env with a picture: the policy crops and rotates the picture with tools that return pictures (as in DeepEyes)."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from relax_core.contracts.env import Action, BaseInteractionEnv, EnvSpec, EpisodeStart, InteractionConfig, StepResult
from relax_core.contracts.media import MediaSource
from relax_core.contracts.tool_calls import ToolCall, ToolMistake, call_tool

if TYPE_CHECKING:
    from PIL.Image import Image

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MIN_SIDE = 8  # smallest side of a crop in pixels; vision towers refuse smaller pictures


@dataclass(frozen=True)
class PictureToolsConfig(InteractionConfig):
    """Holds the settings of the env; relative paths of pictures are relative to ``folder``."""

    name: str = "picture_tools"
    max_turns: int = 4
    folder: str | None = None


Box = tuple[int, int, int, int]


def crop(
    left: Annotated[int, "the first column of pixels"],
    top: Annotated[int, "the first row of pixels"],
    right: Annotated[int, "the column behind the last"],
    bottom: Annotated[int, "the row behind the last"],
) -> Box:
    """Returns a part of the newest picture."""
    return left, top, right, bottom


def rotate(degrees: Annotated[int, "90, 180 or 270, clockwise"]) -> int:
    """Returns the newest picture turned."""
    return degrees


class PictureTools(BaseInteractionEnv):
    """Shows a row's prompt with its pictures, and applies the tools to the newest picture.

    A response without a call ends the episode. The answer is the last text in <answer> tags, or else the whole
    response. The reward is 1 if the answer equals the row's answer, ignoring upper and lower case, and otherwise 0.
    """

    def __init__(self, start: EpisodeStart, config: PictureToolsConfig) -> None:
        self._row = start.row
        self._folder = Path(config.folder or "")
        self._picture: Image | None = None
        self._failed = 0

    def reset(self) -> Any:
        """Returns the row's prompt."""
        return self._row["prompt"]

    def step(self, action: Action) -> StepResult:
        """Returns the pictures of the calls, or the end of the episode."""
        if action.tool_calls:
            return StepResult(
                observation=[{"role": "tool", "content": self._result(call)} for call in action.tool_calls]
            )
        if action.parse_error:
            return StepResult(observation=action.parse_error)
        text = action.content or action.text
        answer = (_ANSWER.findall(text) or [text])[-1]
        right = answer.strip().lower() == str(self._row["answer"]).strip().lower()
        return StepResult(reward=float(right), done=True, info={"failed_tool_calls": self._failed})

    def _result(self, call: ToolCall) -> Any:
        """Returns the result of a call for the model: a picture, or a text about the error in the call."""
        from PIL.Image import Transpose

        try:
            picture, given = self._newest(), call_tool([crop, rotate], call)
            if call.name == "crop":
                picture = picture.crop(_checked(given, picture))
            else:
                turns = {90: Transpose.ROTATE_270, 180: Transpose.ROTATE_180, 270: Transpose.ROTATE_90}  # anticlockwise
                if given not in turns:
                    raise ToolMistake(f"A picture turns by 90, 180 or 270 degrees, not by {given}.")
                picture = picture.transpose(turns[given])
        except ToolMistake as mistake:
            self._failed += 1
            return str(mistake)
        self._picture = picture
        written = io.BytesIO()
        picture.save(written, format="PNG")
        return [{"type": "image", "image": MediaSource(kind="image", data=written.getvalue())}]

    def _newest(self) -> Image:
        """Returns the newest picture. The row's picture was decoded under the run's limits before the first turn."""
        if self._picture is None:
            from PIL import Image, ImageOps

            source = _pictures(self._row["prompt"])[-1]
            file = io.BytesIO(source.data) if source.data is not None else self._folder / str(source.path)
            with Image.open(file) as opened:
                self._picture = ImageOps.exif_transpose(opened).convert("RGB")
        return self._picture


def _checked(box: Box, picture: Image) -> Box:
    left, top, right, bottom = box
    if not (left >= 0 and right <= picture.width and top >= 0 and bottom <= picture.height):
        raise ToolMistake(f"The part {box} is not inside of the picture of {picture.width} x {picture.height} pixels.")
    if right - left < _MIN_SIDE or bottom - top < _MIN_SIDE:
        raise ToolMistake(f"A part has at least {_MIN_SIDE} x {_MIN_SIDE} pixels.")
    return box


def _pictures(prompt: Any) -> list[MediaSource]:
    """Returns the pictures of a row's prompt; raises `ToolMistake` for a prompt without pictures."""
    parts = (
        []
        if isinstance(prompt, str)
        else [message["content"] for message in prompt if not isinstance(message["content"], str)]
    )
    found = [part["image"] for content in parts for part in content if part["type"] == "image"]
    if not found:
        raise ToolMistake("There is no picture here.")
    return found


def tools(row: Mapping[str, Any], config: PictureToolsConfig) -> Sequence[Callable[..., Any]]:
    """Returns the two tools."""
    return [crop, rotate]


def check(config: PictureToolsConfig) -> None:
    """Raises ValueError if the package that reads pictures is missing."""
    if find_spec("PIL") is None:
        raise ValueError("env=picture_tools needs the package pillow: pip install 'relax-core[omni]'.")


SPEC = EnvSpec(
    name="picture_tools",
    summary="a question about a picture, with tools that crop and turn it",
    config=PictureToolsConfig,
    open=PictureTools,
    tools=tools,
    check=check,
)
