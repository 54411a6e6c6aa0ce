"""Finds calls that may wait without a deadline, in the syntax tree. tests/test_deadlines.py uses this checker.

A call is bounded if it has a deadline (keyword or positional), if it does not block, or if it is inside of ``async with
asyncio.timeout(…)``. ``timeout=None`` does not count as a deadline. Collectives use the deadline of their group, so the
checker checks the creation of groups.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Dotted name → the keyword of the deadline, and the number of positional arguments that include the deadline.
FUNCTIONS: dict[str, tuple[str, int | None]] = {
    "ray.get": ("timeout", None),
    "ray.wait": ("timeout", None),
    "subprocess.run": ("timeout", None),
    "subprocess.call": ("timeout", None),
    "subprocess.check_call": ("timeout", None),
    "subprocess.check_output": ("timeout", None),
    "socket.create_connection": ("timeout", 2),
    "urllib.request.urlopen": ("timeout", 3),
    "http.client.HTTPConnection": ("timeout", 3),
    "http.client.HTTPSConnection": ("timeout", 3),
    "aiohttp.ClientSession": ("timeout", None),
    "asyncio.wait": ("timeout", None),
    "asyncio.wait_for": ("", None),  # in Python 3.11 it drops a cancellation that comes with the value
    "asyncio.timeout": ("delay", 1),
    "asyncio.gather": ("", None),
    "select.select": ("timeout", 4),
    "selectors.select": ("timeout", 1),
    "init_process_group": ("timeout", None),
    "new_group": ("timeout", None),
    "initialize_model_parallel": ("distributed_timeout_minutes", None),
    "TCPStore": ("timeout", 5),
    **{
        f"{library}.{verb}": ("timeout", None)
        for library in ("requests", "httpx")
        for verb in ("get", "post", "put", "patch", "delete", "head", "request", "stream", "Client", "AsyncClient")
    },
}
# Methods of any object → the number of positional arguments that include the deadline.
METHODS: dict[str, int] = {
    "result": 1,
    "exception": 1,
    "join": 1,
    "wait": 1,
    "acquire": 2,
    "get": 1,
    "communicate": 2,
    "wait_for": 2,
    "recv": 99,
    "recv_bytes": 99,
    "accept": 99,
}
NOT_WAITING = ("block", "blocking")  # with False for such a keyword, the call does not wait
STREAMS = ("stdin", "stdout", "stderr")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Holds a call that may wait without a deadline. ``function`` is the qualified name of the calling function."""

    file: str
    function: str
    line: int
    call: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}: {self.call}"


def unbounded_waits(source: str, *, file: str) -> list[Finding]:
    """Returns the findings of one module, ordered by line."""
    visitor = _Visitor(file)
    visitor.visit(ast.parse(source))
    return sorted(visitor.findings, key=lambda finding: finding.line)


def unbounded_waits_below(root: Path, folders: tuple[str, ...]) -> Iterator[Finding]:
    """Yields the findings of all modules below ``folders``."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield from unbounded_waits(path.read_text(encoding="utf-8"), file=str(path.relative_to(root)))


class _Visitor(ast.NodeVisitor):
    def __init__(self, file: str) -> None:
        self._file = file
        self._scope: list[str] = []
        self._imported: dict[str, str] = {}  # local name → dotted name
        self._bounded = 0  # number of deadlines around the node
        self.findings: list[Finding] = []

    def _visit_scope(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._scope.append(node.name)
        bounded, self._bounded = self._bounded, 0  # the body runs at a later call, outside the deadline
        self.generic_visit(node)
        self._bounded = bounded
        self._scope.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _visit_scope

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            self._imported[name.asname or name.name.partition(".")[0]] = (
                name.name if name.asname else (name.name.partition(".")[0])
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for name in node.names:
            self._imported[name.asname or name.name] = f"{node.module}.{name.name}"

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        timed = any(self._dotted(call.func) == "asyncio.timeout" and _has_deadline(call, "delay", 1) for call in calls)
        self._bounded += timed
        self.generic_visit(node)
        self._bounded -= timed

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and self._dotted(call.func).endswith("PoolExecutor"):
                self._found(call, f"with {ast.unparse(call)}")  # the exit of the block waits for running tasks
        self.generic_visit(node)

    def visit_Await(self, node: ast.Await) -> None:
        if _is_remote_call(node.value) and not self._bounded:
            self._found(node, ast.unparse(node))
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        if isinstance(node.iter, ast.Attribute) and node.iter.attr in STREAMS:
            self._found(node, f"for … in {ast.unparse(node.iter)}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._dotted(node.func)
        if not self._bounded and self._waits_for_ever(node, name):
            self._found(node, ast.unparse(node))
        self.generic_visit(node)

    def _waits_for_ever(self, node: ast.Call, name: str) -> bool:
        last = name.rpartition(".")[2]
        known = FUNCTIONS.get(name) or (FUNCTIONS.get(last) if last in _BY_LAST_NAME else None)
        if known is not None:
            return not _has_deadline(node, *known)
        if name == "os.waitpid":
            return "WNOHANG" not in ast.unparse(node)
        if name == "fcntl.flock":
            flags = ast.unparse(node)
            return "LOCK_NB" not in flags and "LOCK_UN" not in flags
        if not isinstance(node.func, ast.Attribute):
            return False
        if last == "shutdown":  # an executor's shutdown; ray.shutdown and serve.shutdown have no such argument
            return not name.startswith(("ray.", "serve.")) and _keyword(node, "wait") != "False"
        if last in ("read", "readline", "readlines"):
            return isinstance(node.func.value, ast.Attribute) and node.func.value.attr in STREAMS
        if last not in METHODS or _is_class(node.func.value) or (last == "get" and len(node.args) > 1):
            return False
        if any(keyword.arg is not None and keyword.arg.endswith("_s") for keyword in node.keywords):
            return False  # a method of Relax with a deadline in seconds, under another name
        if "False" in [_keyword(node, key) for key in NOT_WAITING] + [ast.unparse(first) for first in node.args[:1]]:
            return False
        return not _has_deadline(node, "timeout", METHODS[last])

    def _dotted(self, function: ast.expr) -> str:
        """Returns the dotted name with resolved imports: after ``from subprocess import run``, ``run`` is
        "subprocess.run".
        """
        parts: list[str] = []
        while isinstance(function, ast.Attribute):
            parts.append(function.attr)
            function = function.value
        parts.append(self._imported.get(function.id, function.id) if isinstance(function, ast.Name) else "")
        return ".".join(reversed(parts))

    def _found(self, node: ast.AST, call: str) -> None:
        function = ".".join(self._scope) or "<module>"
        self.findings.append(Finding(file=self._file, function=function, line=node.lineno, call=call))  # type: ignore[attr-defined]


_BY_LAST_NAME = {"init_process_group", "new_group", "initialize_model_parallel", "TCPStore"}


def _has_deadline(node: ast.Call, keyword: str, positional: int | None) -> bool:
    given = _keyword(node, keyword) or (_keyword(node, "timeout_s") if keyword == "timeout" else None)
    if given is None and any(option.arg is None for option in node.keywords):
        return True  # **options may have a deadline; not checked
    if given is None and positional is not None and len(node.args) >= positional:
        given = ast.unparse(node.args[positional - 1])
    return given not in (None, "None", "True")  # get(True) blocks


def _keyword(node: ast.Call, name: str) -> str | None:
    return next((ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == name), None)


def _is_class(node: ast.expr) -> bool:
    """Returns whether the name looks like a class: ``HydraConfig.get()`` is not the method of a queue."""
    return isinstance(node, ast.Name) and node.id[0].isupper() and not node.id.isupper()


def _is_remote_call(node: ast.expr) -> bool:
    """Returns whether this is ``worker.method.remote(…)``. Its result arrives only if the worker's process lives."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "remote"
