"""Scores answers to questions of data=reasoning_gym with the package reasoning-gym.

For some tasks the package evaluates the answer as Python: lists, and formulas by sympy. Answers with anything other
than a formula or a list are not evaluated and get no reward. The sandbox limits the remaining risk: each answer is
scored in a separate process.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_THINKING_ENDS = "</think>"
_SHOWN = 100  # limit of a refused answer in a message
_TEXTS = ("<string>", "<lambdifygenerated")  # file names of code objects that eval, exec or sympy compiles from text
# Functions that sympy writes around numbers and names, and functions that formulas in answers may call.
_FUNCTIONS = frozenset(
    [
        *("Integer", "Float", "Rational", "Symbol", "Function", "factorial", "factorial2", "Abs", "abs", "Add", "Mul"),
        *("Pow", "Mod", "sqrt", "exp", "log", "ln", "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan"),
        *("acot", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfi", "gamma", "Ei", "Si", "Ci", "li"),
    ]
)
_OF_LAMBDIFY = (ast.FunctionDef, ast.arguments, ast.arg, ast.Return)
_NODES = (
    *(ast.Expression, ast.Module, ast.Expr, ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.Call),
    *(ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop),
)


@dataclass(frozen=True)
class ReasoningGymConfig(RewardConfig):
    """Holds the settings of the reward. ``timeout_s`` is the limit per answer in seconds."""

    name: str = "reasoning_gym"
    timeout_s: float = 10.0


class _Watch:
    """While `on` is true, refuses to compile texts that are programs. `found` is the first refused text.

    It allows code that sympy compiles for itself: imports of names, and functions that contain no text of an answer.
    """

    def __init__(self) -> None:
        from sympy.polys.monomials import MonomialOps

        lambdify = sys.modules["sympy.utilities.lambdify"]  # the package also exports a function with this name
        commands = (name for *_, of_module in lambdify.MODULES.values() for name in of_module)
        self._imports = frozenset([*commands, "from sympy import *"])
        self._own = MonomialOps._build.__code__
        self.on = False
        self.found = ""
        sys.addaudithook(self._audit)  # permanent, because a hook cannot be removed

    def _audit(self, event: str, values: tuple[Any, ...]) -> None:
        if event != "compile" or not self.on or values[0] is None or not str(values[1]).startswith(_TEXTS):
            return
        program = values[0].decode(errors="replace") if isinstance(values[0], bytes) else values[0]
        if program in self._imports or sys._getframe(1).f_code is self._own:
            return
        self.on = False  # the parser compiles the text, too
        try:
            safe = _is_formula(program, generated=values[1] != _TEXTS[0])
        finally:
            self.on = True
        if not safe:
            self.found = self.found or str(program)
            raise ValueError("the answer is a program")  # the package may catch the error, but `found` stays set


_watch = lru_cache(maxsize=1)(_Watch)


def _is_formula(program: str | ast.AST, *, generated: bool) -> bool:
    """Returns whether a text has only numbers, names, strings, lists, operators and functions of formulas.

    Code that sympy has ``generated`` may define a function.
    """
    try:
        tree = program if isinstance(program, ast.AST) else ast.parse(program.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True  # such a text cannot be compiled either
    for node in ast.walk(tree):
        if not isinstance(node, (*_NODES, *_OF_LAMBDIFY) if generated else _NODES):
            return False
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            return False
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS):
            return False
    return True


def prepare() -> None:
    """Imports the package before the first answer is scored, because the import takes seconds."""
    import reasoning_gym  # noqa: F401
    import sympy.parsing.sympy_parser  # noqa: F401

    _watch()


def score(given: RewardInput, config: ReasoningGymConfig) -> RewardOutput:
    """Returns the package's score, from 0 to 1, for the last text in <answer> tags, else for the whole response.

    Thinking is ignored. Raises ValueError for a row of another data source.
    """
    if (row := given.row.get("reasoning_gym")) is None:
        raise ValueError("the row has no key reasoning_gym: use reward=reasoning_gym with data=reasoning_gym")
    text = given.response.rpartition(_THINKING_ENDS)[2]
    answer = (_ANSWER.findall(text) or [text])[-1].strip()
    questions, entry = _question(json.dumps(row, sort_keys=True))
    watch = _watch()
    watch.on, watch.found = True, ""
    try:
        value = float(questions.score_answer(answer, entry))
    finally:
        watch.on = False
    if watch.found:
        reason = f"the answer is a program, which is not evaluated: {watch.found[:_SHOWN]!r}"
        return RewardOutput(reward=None, reason=reason, answer=answer, cause="program")
    why = compared(answer, str(given.answer))
    return RewardOutput(reward=value, exact=value == 1.0, answer=answer, why=why)


@lru_cache(maxsize=256)
def _question(row: str) -> tuple[Any, Any]:
    """Returns a row's data set and its question. The result is cached for the following answers of the group."""
    of = json.loads(row)
    questions = _questions(json.dumps([of["task"], of["seed"], of["size"], of["arguments"]]))
    return questions, questions[of["index"]]


@lru_cache(maxsize=8)
def _questions(drawn: str) -> Any:
    import reasoning_gym

    task, seed, size, arguments = json.loads(drawn)
    return reasoning_gym.create_dataset(task, seed=seed, size=size, **arguments)


def check(config: ReasoningGymConfig) -> None:
    """Raises ValueError if the package is missing."""
    if find_spec("reasoning_gym") is None:
        raise ValueError("reward=reasoning_gym needs the package reasoning-gym: pip install 'relax-core[envs]'.")


SPEC = RewardSpec(
    name="reasoning_gym",
    summary="the score of the package reasoning-gym, in a killable worker",
    config=ReasoningGymConfig,
    score=score,
    isolated=True,
    needs_sandbox=True,
    check=check,
    prepare=prepare,
)
