"""Tests that every wait has a deadline, or a reason in `tests/deadline_reasons.py`."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.deadline_reasons import REASONS
from tests.deadlines import Finding, unbounded_waits, unbounded_waits_below

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("relax_core", "launchers", "rewards", "algorithms", "envs", "data_sources")


def words(findings: list[Finding]) -> str:
    return "\n".join(f"  {finding}" for finding in findings)


def test_every_wait_has_a_deadline_or_a_reason() -> None:
    unexplained = [
        finding for finding in unbounded_waits_below(ROOT, FOLDERS) if (finding.file, finding.function) not in REASONS
    ]
    assert not unexplained, f"give these a deadline that names its blocker:\n{words(unexplained)}"


def test_no_reason_outlives_its_wait() -> None:
    found = {(finding.file, finding.function) for finding in unbounded_waits_below(ROOT, FOLDERS)}
    assert not REASONS.keys() - found, "these functions no longer wait without a deadline: remove their reasons"


def found(code: str) -> list[str]:
    return [finding.call for finding in unbounded_waits(textwrap.dedent(code), file="a.py")]


@pytest.mark.parametrize(
    "call",
    [
        "ray.get(reference)",
        "ray.get([one, two], timeout=None)",
        "ray.wait(references, num_returns=2)",
        "subprocess.run(['ls'], check=True)",
        "subprocess.check_output(['ls'])",
        "future.result()",
        "future.exception()",
        "future.result(None)",
        "thread.join()",
        "process.wait()",
        "event.wait()",
        "condition.wait_for(lambda: ready)",
        "lock.acquire()",
        "lock.acquire(True)",
        "queue.get()",
        "queue.get(True)",
        "queue.get(block=True)",
        "process.communicate(b'x')",
        "process.stdout.readline()",
        "sys.stdin.read()",
        "connection.recv()",
        "listener.accept()",
        "socket.create_connection(('127.0.0.1', 1))",
        "select.select([one], [], [])",
        "os.waitpid(pid, 0)",
        "fcntl.flock(file, fcntl.LOCK_EX)",
        "requests.get('http://127.0.0.1')",
        "httpx.Client()",
        "urllib.request.urlopen('http://127.0.0.1')",
        "http.client.HTTPConnection('127.0.0.1', 80)",
        "aiohttp.ClientSession()",
        "asyncio.wait({task})",
        "asyncio.wait_for(call, 5.0)",
        "asyncio.gather(one, two)",
        "pool.shutdown()",
        "pool.shutdown(wait=True)",
        "dist.init_process_group('gloo', rank=0)",
        "dist.new_group([0, 1])",
        "parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)",
        "dist.TCPStore('127.0.0.1', 1)",
    ],
)
def test_what_may_wait_for_ever_is_found(call: str) -> None:
    assert found(call) == [call]


@pytest.mark.parametrize(
    "call",
    [
        "ray.get(reference, timeout=5)",
        "subprocess.run(['ls'], timeout=deadline_s)",
        "future.result(5)",
        "future.result(timeout=5)",
        "thread.join(5.0)",
        "', '.join(words)",
        "os.path.join('a', 'b')",
        "lock.acquire(timeout=1.0)",
        "lock.acquire(False)",
        "lock.acquire(blocking=False)",
        "queue.get(timeout=1.0)",
        "queue.get(True, 1.0)",
        "queue.get(block=False)",
        "queue.get_nowait()",
        "mapping.get('key')",
        "mapping.get('key', None)",
        "HydraConfig.get()",
        "process.poll()",
        "file.read()",
        "file.readline()",
        "child.wait(frozen_after_s=3.0)",
        "select.select([one], [], [], 0.0)",
        "os.waitpid(pid, os.WNOHANG)",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(file, fcntl.LOCK_UN)",
        "asyncio.wait({task}, timeout=1.0)",
        "pool.shutdown(wait=False)",
        "ray.shutdown()",
        "dist.init_process_group('gloo', timeout=deadline)",
        "dist.all_reduce(tensor)",
        "worker.status.remote()",
    ],
)
def test_what_is_bounded_is_not_found(call: str) -> None:
    assert found(call) == []


def test_names_are_followed_through_imports() -> None:
    assert found("from subprocess import run as go\ngo(['ls'])") == ["go(['ls'])"]
    assert found("import subprocess as sp\nsp.run(['ls'])") == ["sp.run(['ls'])"]
    assert found("from asyncio import gather\ngather(one)") == ["gather(one)"]


def test_answers_of_actors_need_a_deadline_around_them() -> None:
    assert found("async def f():\n    await worker.status.remote()") == ["await worker.status.remote()"]
    inside = """
        async def f():
            async with asyncio.timeout(5):
                await worker.status.remote()
                await asyncio.gather(one, two)
    """
    assert found(inside) == []
    assert found(inside.replace("timeout(5)", "timeout(None)")) != []


def test_a_deadline_around_a_definition_is_none_inside_of_it() -> None:
    code = """
        async def f():
            async with asyncio.timeout(5):
                async def later():
                    await event.wait()
    """
    assert found(code) == ["event.wait()"]


def test_an_executor_as_a_context_waits_at_its_end() -> None:
    assert found("with ThreadPoolExecutor(2) as pool:\n    pass") == ["with ThreadPoolExecutor(2)"]


def test_a_loop_over_a_pipe_waits_for_each_line() -> None:
    assert found("for line in process.stdout:\n    pass") == ["for … in process.stdout"]


def test_a_finding_names_its_function() -> None:
    (finding,) = unbounded_waits("class A:\n    def b(self):\n        self.c.wait()", file="x/a.py")
    assert str(finding) == "x/a.py:3 in A.b: self.c.wait()"
