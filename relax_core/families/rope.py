"""Reads a model's rotary embedding from config.json: the base and the scaling of frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_THETA = 10_000.0  # All configuration classes of transformers that Relax reads have this default.


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Holds position interpolation (Chen et al., arXiv 2306.15595): each frequency is divided by ``factor``."""

    factor: float

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Returns the scaled frequencies."""
        return frequencies / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Holds Llama 3.1's scaling, which changes low frequencies only.

    Sources: rope_type "llama3" of transformers, and `apply_scaling` of Meta's llama-models. A frequency that turns at
    least ``high_freq_factor`` times in ``original_positions`` tokens is unchanged. A frequency that turns at most
    ``low_freq_factor`` times is divided by ``factor``. Between these limits the unchanged share grows linearly with the
    number of turns.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Returns the scaled frequencies."""
        turns = frequencies * (self.original_positions / (2 * math.pi))
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clip(0.0, 1.0)
        return frequencies * kept + frequencies / self.factor * (1.0 - kept)


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Holds a rotary embedding (Su et al. 2021, arXiv 2104.09864).

    Component i of a head of dimension d turns by ``theta``^(-2i/d) radians per position before ``scaling``. With
    ``sections`` (time, height, width) the components are interleaved, as in Qwen3-VL. Component i follows the height
    if i % 3 is 1 and i < 3 * sections[1]. It follows the width if i % 3 is 2 and i < 3 * sections[2]. All other
    components follow the time.
    Only the first ``part`` of each head is rotated; d is then the size of that part.
    """

    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None
    sections: tuple[int, int, int] | None = None
    part: float = 1.0

    def axes(self, components: int) -> list[int]:
        """Returns the rotary position that each component of a head uses: 0 time, 1 height, 2 width."""
        axes = [0] * components
        for axis in (1, 2):
            for component in range(axis, 3 * (self.sections or (0, 0, 0))[axis], 3):
                axes[component] = axis
        return axes

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Returns ``frequencies`` after scaling; both are float32 ``[head_dim / 2]`` in radians per position."""
        return frequencies if self.scaling is None else self.scaling.scaled(frequencies)


def read_rope(config: Mapping[str, Any], *, family: str, part: float | None = None) -> Rope:
    """Reads the rotary embedding from config.json.

    ``part`` is `relax_core.contracts.family.Family.rotary_part`.

    transformers 5 writes ``rope_parameters``; older versions wrote ``rope_scaling`` and ``rope_theta``. Raises
    ValueError for an unsupported scaling, and KeyError for a scaling that lacks a number.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    theta = float(given.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA)
    nested = [key for key, value in given.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(
            f"config.json rope_parameters differ by kind of layer ({', '.join(nested)}): {family} supports only one "
            "rotary embedding for all layers."
        )
    rotated = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or part or 1.0
    if rotated != 1.0 and part is None:
        raise ValueError(
            f"config.json partial_rotary_factor={rotated}: {family} supports only rotary embedding of whole heads."
        )
    if kind == "default":
        return Rope(theta=theta, sections=_sections(given, family=family), part=rotated)
    if rotated != 1.0:
        raise ValueError(f"config.json rope_type={kind}: {family} rotates a part of each head with default only.")
    if "mrope_section" in given:
        raise ValueError(f"config.json rope_type={kind}: {family} supports three sections only with rope_type=default.")
    if kind == "linear":
        return Rope(theta=theta, scaling=LinearScaling(factor=given["factor"]))
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=given["factor"],
            low_freq_factor=given["low_freq_factor"],
            high_freq_factor=given["high_freq_factor"],
            original_positions=given.get("original_max_position_embeddings") or config["max_position_embeddings"],
        )
        if not scaling.low_freq_factor < scaling.high_freq_factor:
            raise ValueError(
                f"config.json low_freq_factor={scaling.low_freq_factor}: must be less than high_freq_factor="
                f"{scaling.high_freq_factor}."
            )
        return Rope(theta=theta, scaling=scaling)
    raise ValueError(
        f"config.json rope_type={kind}: {family} computes only rope_type default, linear and llama3. If the scaling "
        "only lengthens the context (yarn, dynamic), a config.json without it describes the same model at the length "
        "that it was trained with."
    )


def _sections(given: Mapping[str, Any], *, family: str) -> tuple[int, int, int] | None:
    sections = given.get("mrope_section")
    if sections is None:
        return None
    if not given.get("mrope_interleaved", True) or len(sections) != 3:
        raise ValueError(
            f"config.json mrope_section={sections}, mrope_interleaved={given.get('mrope_interleaved')}: {family} "
            "computes three interleaved sections only."
        )
    time, height, width = sections
    return time, height, width
