"""Makes the command and the environment of an agent: no shell, and only a few variables of the run's own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from relax_core.config.sections.agent_schema import AgentConfig

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
# Where programs, files and words of the user's language are found. Any other variable may hold a secret.
_KEPT = (
    *("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_MESSAGES"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_HOME", "XDG_CACHE_HOME", "LD_LIBRARY_PATH"),
)
_LOOPBACK = "127.0.0.1,localhost,::1"


def command_words(agent: AgentConfig, *, of_env: Sequence[str] = ()) -> list[str]:
    """Returns the words of the agent's command: those ``of_env``, or else those of agent.command; none without it.

    A leading "python" becomes agent.python, or the interpreter of the run. Raises ValueError for a quote that does not
    end.
    """
    words = list(of_env)
    if not words and agent.command is not None:
        try:
            words = shlex.split(agent.command)
        except ValueError as error:
            raise ValueError(f"agent.command={agent.command}: {error}. Close the quote, or escape it.") from error
        if not words:
            raise ValueError('agent.command is empty. Give a command, such as agent.command="python my_agent.py".')
    if words and _PYTHON.fullmatch(words[0]):
        words[0] = agent.python or sys.executable
    return words


def agent_environment(agent: AgentConfig, more: Mapping[str, str]) -> dict[str, str]:
    """Returns all variables of an agent's environment: a few of the run's, agent.env, and ``more``.

    The folder of agent.python is the first one on PATH. No proxy stands before the endpoint on this machine.
    """
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    python = str(Path(agent.python or sys.executable).parent)
    path = os.pathsep.join([python, agent.env.get("PATH", os.environ.get("PATH", os.defpath))])
    defaults = {"PYTHONUNBUFFERED": "1", "NO_PROXY": _LOOPBACK, "no_proxy": _LOOPBACK}
    return {**kept, **defaults, **agent.env, "PATH": path, **more}


def command_problem(agent: AgentConfig, words: Sequence[str]) -> str | None:
    """Returns why a command cannot run: its program, its script or its folder is not there. None if it can."""
    folder = Path(agent.cwd or Path.cwd())
    if not folder.is_dir():
        return f"agent.cwd={folder}: no such folder. Give the folder in which the agent is to run."
    if agent.python is not None and not os.access(agent.python, os.X_OK):
        return f"agent.python={agent.python}: no such program. Give the interpreter, such as .venv-agents/bin/python."
    program = words[0]
    found = folder / program if os.sep in program else shutil.which(program, path=agent_environment(agent, {})["PATH"])
    if found is None or not os.access(found, os.X_OK) or Path(found).is_dir():
        return f"agent.command: there is no program {program} (agent.cwd={folder}). Give its path, or install it."
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    if Path(program).name.startswith("python") and script.endswith(".py") and not (folder / script).is_file():
        return f"agent.command: there is no file {script} in agent.cwd={folder}. Give its path, or set agent.cwd."
    return None
