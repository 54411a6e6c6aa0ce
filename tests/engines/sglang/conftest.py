"""Shares the launch of SGLang's server with the tests of the engine contract."""

from tests.contracts.engine.conftest import launch, model_folder, sglang_launch

__all__ = ["launch", "model_folder", "sglang_launch"]
