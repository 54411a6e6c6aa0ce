"""Starts real engine processes with a tiny random model, like the engine's contract suite."""

from tests.contracts.engine.conftest import launch, model_folder, sglang_launch, start_engine

__all__ = ["launch", "model_folder", "sglang_launch", "start_engine"]
