"""Python environments of `make test-agents`. Their packages conflict with Relax or with each other."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AGENTS = str(ROOT / ".venv-agents" / "bin" / "python")  # clients of agents, and openenv
VERIFIERS = str(ROOT / ".venv-verifiers" / "bin" / "python")  # verifiers needs an older openai and an older mcp
