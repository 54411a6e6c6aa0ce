"""Marks tests of one of the trainer's branches, because `make test-gpu-branch` runs tests/train in the GPU branch.

A test without a mark holds in both branches.
"""

from __future__ import annotations

import pytest

from relax_core.train.device import training_device


def cpu_branch_only(reason: str) -> pytest.MarkDecorator:
    """Skips a test in a process that takes the GPU branch; ``reason`` says what differs there."""
    return pytest.mark.skipif(training_device().gpu, reason=f"the CPU branch only: {reason}")
