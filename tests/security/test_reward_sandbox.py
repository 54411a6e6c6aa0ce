"""Tests isolated rewards in the sandbox: limits of a hostile reward or answer, and recovery from a lost process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_core.config.reward_choice import RewardChoice
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec
from relax_core.registry import find_reward
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.sandbox.seccomp_filter import ANSWER_REFUSED, ARCHITECTURES
from relax_core.sandbox.worker_sandbox import worker_refusal

ROOT = Path(__file__).parents[2]
# Executes the answer as a program, like a library with eval. The test receives the value of `result`.
PROBE = """
import os
from dataclasses import dataclass
from relax_core.contracts.reward import RewardConfig, RewardOutput, RewardSpec

@dataclass(frozen=True)
class Config(RewardConfig):
    name: str = "probe"

kept = []

def score(given, config):
    scope = {"kept": kept, "result": ""}
    exec(given.response, scope)
    return RewardOutput(reward=1.0, why=str(scope["result"]))

SPEC = RewardSpec(
    name="probe", summary="s", config=Config, score=score, isolated=True, needs_sandbox=NEEDS, reads=READS
)
"""


@pytest.fixture(autouse=True)
def _needs_sandbox() -> None:
    if refusal := worker_refusal():
        pytest.skip(refusal)


@pytest.fixture
def pool_of(tmp_path: Path) -> Iterator[Callable[..., RewardPool]]:
    pools: list[RewardPool] = []

    def make(*, needs: bool = False, reads: str = "lambda config: ()", **config: Any) -> RewardPool:
        folder = tmp_path / "mine"
        folder.mkdir(exist_ok=True)
        file = folder / f"probe{len(pools)}.py"
        file.write_text(PROBE.replace("NEEDS", str(needs)).replace("READS", reads))
        spec = find_reward(str(file))
        log_file, media = config.pop("log_file", None), config.pop("media_folder", "")
        settings = spec.config(name=str(file), **{"timeout_s": 30.0, "max_failed": 1.0, **config})
        pools.append(RewardPool(spec, settings, workers=1, log_file=log_file, media_folder=media))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def outputs(pool: RewardPool, *answers: str, row: dict[str, Any] | None = None, label: str = "") -> list[RewardOutput]:
    given = [RewardInput(response=text, stopped=True, answer=label, row=row or {"x": 1}) for text in answers]
    return asyncio.run(pool.score(given))


def saw(pool: RewardPool, program: str) -> str:
    (output,) = outputs(pool, program)
    assert output.reward == 1.0, output
    return output.why


def test_a_reward_reads_no_secret_reaches_no_port_and_writes_nowhere(
    pool_of: Callable[..., RewardPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, run = tmp_path / "home", tmp_path / "mine" / "runs" / "one"
    for folder in (home, run):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("MY_TOKEN", "planted")
    places = [tmp_path / "written", tmp_path / "mine" / "written", ROOT / "rewards" / "written"]
    secrets = [home / ".netrc", run / "token", tmp_path / "mine" / ".env", tmp_path / "mine" / "labels.json"]
    for secret in secrets:
        secret.write_text("planted")
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"""
import os, socket
result = []
for path in {list(map(str, secrets))!r} + ["/proc/self/environ", "/etc/passwd"]:
    if os.path.exists(path):
        result.append(os.path.basename(path))
if "planted" in str(dict(os.environ)):
    result.append("environment")
try:
    socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 5).close()
    result.append("port")
except OSError:
    pass
for path in {list(map(str, places))!r}:
    try:
        open(path, "w").close()
    except OSError:
        pass
try:
    os.chmod("/dev/null", 0o600)
except OSError:
    pass
"""
        mode = os.stat("/dev/null").st_mode
        assert saw(pool_of(), program) == "[]"
        assert os.stat("/dev/null").st_mode == mode and not any(place.exists() for place in places)
        plain = saw(pool_of(sandbox="none"), program.replace('os.chmod("/dev/null", 0o600)', "pass"))
    written = [place for place in places if place.exists()]
    for place in written:
        place.unlink()
    assert written == places  # without the sandbox, the attack works
    assert all(word in plain for word in (".netrc", "token", "environment", "port"))


def test_files_that_a_reward_declares_and_those_of_media_are_readable(
    pool_of: Callable[..., RewardPool], tmp_path: Path
) -> None:
    labels, media = tmp_path / "labels.json", tmp_path / "media"
    labels.write_text("{}")
    media.mkdir()
    (media / "item").write_text("frames")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "helper.py").write_text("x = 7")
    pool = pool_of(reads=f"lambda config: ({str(labels)!r},)", media_folder=str(media))
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path / "mine")!r})
import helper
result = open({str(labels)!r}).read(), open({str(media / "item")!r}).read(), helper.x
"""
    assert saw(pool, program) == "('{}', 'frames', 7)"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "died (signal SIGKILL)"),
        ("import os; os._exit(3)", "died (exit code 3)"),
        ("import os, time\nif os.fork() == 0:\n    os.setsid()\ntime.sleep(600)", "no answer within 1 s"),
        ("raise RuntimeError('odd')", "RuntimeError: odd"),
        ("x = bytearray(3 * 2**30)", "it needs more memory than reward.memory_gib=1"),
    ],
)
def test_a_lost_process_is_replaced_and_leaves_none(
    pool_of: Callable[..., RewardPool], program: str, reason: str
) -> None:
    pool = pool_of(timeout_s=1.0)
    assert saw(pool, "result = 1") == "1"
    inside = psutil.Process(pool._workers[0].process.pid).children(recursive=True)
    (output,) = outputs(pool, program)
    assert output.reward is None and reason in output.reason, output
    assert saw(pool, "result = 2") == "2"
    left = psutil.Process(pool._workers[0].process.pid).children(recursive=True)
    pool.close()
    _, alive = psutil.wait_procs({*inside, *left}, timeout=30)
    assert not alive


def test_output_goes_to_the_log_and_a_flood_does_not_fill_the_disk(
    pool_of: Callable[..., RewardPool], tmp_path: Path
) -> None:
    log = tmp_path / "reward.log"
    pool = pool_of(log_file=log)
    saw(pool, "print('of the reward', flush=True)")
    flood = "import os\nfor _ in range(2000):\n    os.write(2, b'x' * 65536)\n"
    saw(pool, flood + "try:\n    os.ftruncate(2, 0)\nexcept OSError:\n    pass")
    pool.close()
    until = time.monotonic() + 30
    while "limit" not in (text := log.read_text())[-100:]:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert text.startswith("of the reward\n") and len(text) < 70 * 2**20


def test_a_worker_outlives_the_thread_that_started_it_and_not_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "probe.py"
    file.write_text(PROBE.replace("NEEDS", "False").replace("READS", "lambda config: ()"))
    program = f"""
import asyncio, threading
from relax_core.contracts.reward import RewardInput
from relax_core.registry import find_reward
from relax_core.rollout.rewards.reward_pool import RewardPool
spec = find_reward({str(file)!r})
made = []
starts = threading.Thread(target=lambda: made.append(RewardPool(spec, spec.config(name={str(file)!r}), workers=1)))
starts.start()
starts.join()
def score(text):
    return asyncio.run(made[0].score([RewardInput(response=text, stopped=True, answer="", row={{}})]))[0]
assert score("pass").reward == 1.0 and not score("pass").reason
print(made[0]._workers[0].process.pid, flush=True)
score("10 ** 10 ** 10")
"""
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        worker = psutil.Process(int(owner.stdout.readline()))
        below = [worker, *worker.children(recursive=True)]
        until = time.monotonic() + 60
        while max(process.cpu_times().user for process in below) < 1.0:  # the answer never releases the GIL
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.communicate(timeout=30)
    _, alive = psutil.wait_procs(below, timeout=5)  # the worker's CPU timer would end it only after 11 s
    assert not alive


# For a reward with a library that evaluates answers.
COLUMN = ARCHITECTURES[os.uname().machine].column
HOSTILE = {
    "a later answer": "import builtins, relax_core.rollout.rewards.reward_calls as m\n"
    "kept.append(1)\nm.score_sync = lambda *given: 1 / 0\nbuiltins.float = None",
    "the pipe to the run": "import os\nfor one in range(64):\n    try:\n        os.write(one, b'\\0\\0\\0\\1\\xc0')\n"
    "    except OSError:\n        pass\nos._exit(0)",
    "another process": "import os\nos.kill(os.getppid(), 9)",
    "limits of another process": "import os, resource\n"
    "resource.prlimit(os.getppid(), resource.RLIMIT_DATA, (2**20, 2**20))",
    "a new process": "import os\nos.fork()",
    "a new program": "import os\nos.execv('/bin/true', ['true'])",
    "a new thread": "import _thread\n_thread.start_new_thread(print, ())",
    "a file": "open('/tmp/left', 'w')",
    "a folder": "import os\nos.mkdir('/tmp/left')",
    "a socket": "import socket\nsocket.socketpair()",
    "its priority": "import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "more memory": "import resource\nresource.setrlimit(resource.RLIMIT_DATA, (2**40, 2**40))",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_program_in_an_answer_changes_nothing_for_other_answers(
    pool_of: Callable[..., RewardPool], what: str
) -> None:
    pool = pool_of(needs=True)
    assert saw(pool, "result = 1") == "1"
    worker = pool._workers[0].process.pid
    (output,) = outputs(pool, HOSTILE[what])
    if what != "a later answer":
        assert output.reward is None and output.cause in ("raised", "died"), output
    assert saw(pool, "import os\nresult = kept, float(2), os.path.exists('/tmp/left')") == "([], 2.0, False)"
    assert pool._workers[0].process.pid == worker


def test_an_answer_that_dies_hangs_or_floods_costs_itself_alone(pool_of: Callable[..., RewardPool]) -> None:
    pool = pool_of(needs=True, timeout_s=1.0)
    program = "import os\nos.abort()"
    assert "died" in outputs(pool, program)[0].reason
    assert "memory" in outputs(pool, "x = bytearray(2 * 2**30)")[0].reason
    assert "no output" in outputs(pool, "result = 'x' * 2**22")[0].reason or outputs(pool, "pass")[0].reward == 1.0
    assert outputs(pool, "while True: pass")[0].cause in ("timeout", "died")
    assert saw(pool, "result = 3") == "3"


TASKS = (
    *(
        "string_insertion",
        "spiral_matrix",
        "binary_matrix",
        "n_queens",
        "simple_integration",
        "intermediate_integration",
    ),
    *("polynomial_multiplication", "puzzle24", "countdown"),
)  # on commit f5979362 each of them ran the programs below


def test_no_answer_of_reasoning_gym_runs_a_program(tmp_path: Path) -> None:
    gym = pytest.importorskip("reasoning_gym")
    witness = tmp_path / "witness"
    programs = [
        f"__import__('os').system('touch {witness}')",
        f"[__import__('os').system('touch {witness}')]",
        f"getattr(__import__('os'), 'system')('touch {witness}')",
        f"exec(\"open('{witness}', 'w')\")",
        f'sqrt(\'open("{witness}", "w")\')',
        f"[open('{witness}', 'w') for x in [1]]",
        f"(lambda: open('{witness}', 'w'))()",
        f"Function('open')('{witness}', 'w')",
        f"diff(\"\\157\\160\\145\\156('{witness}', 'w')\")",
    ]
    spec = find_reward("reasoning_gym")
    with RewardPool(spec, spec.config(name="reasoning_gym", max_failed=1.0), workers=2) as pool:
        for task in TASKS:
            row = {"reasoning_gym": {"task": task, "seed": 1, "size": 2, "arguments": {}, "index": 0}}
            right = str(gym.create_dataset(task, seed=1, size=2)[0]["answer"])
            answers = [f"<answer>{text}</answer>" for text in (right, *programs)]
            first, *other_outputs = outputs(pool, *answers, row=row, label=right)
            if task != "polynomial_multiplication":  # the package draws different questions in each process
                assert first.reward == 1.0, (task, first)
            assert not witness.exists(), task
            assert any(output.cause == "program" for output in other_outputs), (task, other_outputs)
            assert all(output.reward is None or output.reward < 0.1 for output in other_outputs), (task, other_outputs)


def test_such_a_reward_is_refused_without_a_sandbox(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = find_reward("reasoning_gym")
    with pytest.raises(ValueError, match=r"reward\.sandbox=none: reward reasoning_gym .* reward\.sandbox=auto"):
        RewardChoice(spec, spec.config(name="reasoning_gym", sandbox="none"))
    math = find_reward("math")
    by_row = RewardChoice(math, math.config(name="math", sandbox="none", by="scorer"))
    with pytest.raises(ValueError, match=r"reward\.sandbox=none"):
        by_row.of_row({"scorer": "reasoning_gym"})
    mix = find_reward("mix")
    with pytest.raises(ValueError, match=r"reward\.parts\[0\]\.sandbox=none"):
        RewardChoice(mix, mix.config(name="mix", parts=[{"reward": "math", "sandbox": "none"}]))
    monkeypatch.setenv("PATH", str(tmp_path))
    worker_refusal.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"reasoning_gym .*apt-get install bubblewrap"):
            RewardChoice(spec, spec.config(name="reasoning_gym"))
    finally:
        monkeypatch.undo()
        worker_refusal.cache_clear()
    with pytest.raises(ValueError, match="needs_sandbox"):
        RewardSpec(name="x", summary="s", config=RewardConfig, score=lambda given, config: 1.0, needs_sandbox=True)


def test_other_isolated_rewards_run_without_a_sandbox_and_the_log_says_so(
    pool_of: Callable[..., RewardPool],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    worker_refusal.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            pool = pool_of()
    finally:
        monkeypatch.undo()
        worker_refusal.cache_clear()
    assert "without a sandbox" in caplog.text and "apt-get install bubblewrap" in caplog.text
    assert json.loads(saw(pool, "import os, json\nresult = json.dumps(os.path.exists('/proc'))"))


def test_a_path_in_a_data_row_is_no_reward(tmp_path: Path) -> None:
    """On commit f5979362 the rollout imported the file that a row named."""
    witness = tmp_path / "witness"
    file = tmp_path / "evil.py"
    file.write_text(f"open({str(witness)!r}, 'w').close()")
    math = find_reward("math")
    with pytest.raises(ValueError, match=r"scorer=.*evil\.py: .*reward\.parts"):
        RewardChoice(math, math.config(name="math", by="scorer")).of_row({"scorer": str(file)})
    assert not witness.exists()


def test_the_tables_refuse_no_call_twice() -> None:
    numbers = [both[COLUMN] for both in ANSWER_REFUSED.values() if both[COLUMN] != -1]
    assert len(numbers) == len(set(numbers))
