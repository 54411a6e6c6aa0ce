"""Tests a Ray session in a separate process: it is private, needs a token, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from relax_core.contracts.process_trees import EXITED, process_state
from relax_core.control.host import ray_session
from relax_core.control.host.ray_session import new_token_file
from relax_core.control.host.run_paths import remove_stale_runs

ROOT = Path(__file__).resolve().parents[3]

SESSION = """
import json, os, psutil, signal, stat, sys
from pathlib import Path
from relax_core.config.compose import load_config
from relax_core.contracts.stop_signals import STOP_SIGNALS
from relax_core.control.host import ray_session
from relax_core.control.host.run_paths import run_paths
from relax_core.control.host.ray_session import RaySession

ray_session.RAY_CPUS = 1  # so that Ray starts one worker at a time
ordinary = sys.argv[2] == "ordinary"  # as with another version of Ray
if ordinary:
    ray_session.OWN_NODE_RAY = "0"
    sys.modules["relax_core.control.host.own_ray_node"] = None
assert "ray" not in sys.modules, "Ray reads the path of its token when it is imported"
logs = Path(sys.argv[1])
config = load_config([])
config.placement.gpus_per_node = 1  # which Ray believes
signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # as in a controller
try:
    with (
        run_paths(run_dir=logs.parent) as paths,
        RaySession(
            config.launcher, paths, log_dir=logs, placement=config.placement, preloaded=sys.argv[3:]
        ) as session,
    ):
        import ray
        reported = {
            "folder": str(paths.folder),
            "folder_mode": stat.S_IMODE(paths.folder.stat().st_mode),
            "token_mode": stat.S_IMODE(session.token_file.stat().st_mode),
            "token": session.token_file.read_text(),
            "ray_token": os.environ["RAY_AUTH_TOKEN_PATH"],
            "ray_token_mode": stat.S_IMODE(os.stat(os.environ["RAY_AUTH_TOKEN_PATH"]).st_mode),
            "ray_token_text": Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text(),
            "namespace": ray.get_runtime_context().namespace,
            "paths_namespace": paths.namespace,
            "nodes": [node["NodeManagerAddress"] for node in ray.nodes()],
        }

        @ray.remote(num_cpus=0)
        def speak():
            print("a worker's words", flush=True)
            return os.getpid()

        reported["worker"] = ray.get(speak.remote(), timeout=120)
        reported["daemons"] = {name: psutil.Process(pid).name() for name, pid in session.daemons.items()}
        below = psutil.Process().children(recursive=True)
        others = {process.pid for process in below} - {reported["worker"], *session.daemons.values()}
        reported["others"] = [" ".join(psutil.Process(pid).cmdline()) for pid in others]
        servers = [pid for pid in others if "relax_core.control.host.fork_server" in psutil.Process(pid).cmdline()]
        reported["forked"] = [psutil.Process(reported["worker"]).ppid()] == servers
        for process in below:
            for number in STOP_SIGNALS:
                process.send_signal(number)
        reported["worker_again"] = ray.get(speak.remote(), timeout=120)
        reported["ended"] = [process.name() for process in below if not process.is_running()]

        @ray.remote(num_cpus=0)
        def sees(name="CUDA_VISIBLE_DEVICES"):
            return os.environ.get(name)

        reported["sees"] = [ray.get(sees.options(num_gpus=gpus).remote(), timeout=120) for gpus in (0, 1)]
        varied = sees.options(runtime_env={"env_vars": {"RELAX_VARIED": "of its own"}})
        reported["varied"] = ray.get(varied.remote("RELAX_VARIED"), timeout=120)
        for server in servers:
            psutil.Process(server).kill()

        @ray.remote(num_cpus=0)
        class Another:
            def pid(self):
                return os.getpid()

        reported["another"] = psutil.Process(ray.get(Another.remote().pid.remote(), timeout=120)).parent().name()
        print(json.dumps(reported), flush=True)
        if sys.argv[2] == "fail":
            raise RuntimeError("the run failed")
except RuntimeError as error:
    assert str(error) == "the run failed"
assert not paths.folder.exists()
"""


def run_session(logs: Path, end: str, temporary: Path, preloaded: tuple[str, ...]) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", SESSION, str(logs), end, *preloaded],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    reported: dict = json.loads(done.stdout.splitlines()[0])
    return reported


@pytest.mark.parametrize(
    ("end", "preloaded"),
    [("well", ("numpy",)), ("fail", ()), ("ordinary", ("numpy",))],
    ids=["well", "fail", "another Ray"],
)
def test_a_session_is_private_and_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory, end: str, preloaded: tuple[str, ...]
) -> None:
    with tempfile.TemporaryDirectory(prefix="rs") as name:  # pytest's path is too long for socket names
        temporary, logs = Path(name), tmp_path_factory.mktemp("run") / "logs"
        reported = run_session(logs, end, temporary, preloaded)
        assert Path(reported["folder"]).parent == temporary
        assert reported["folder_mode"] == 0o700
        assert reported["token_mode"] == reported["ray_token_mode"] == 0o600
        assert len(reported["token"]) == len(reported["ray_token_text"]) == 64
        assert reported["token"] != reported["ray_token_text"]
        assert reported["namespace"] == reported["paths_namespace"]
        assert len(reported["nodes"]) == 1
        assert reported["daemons"] == {"GCS": "gcs_server", "raylet": "raylet"}
        other_lines = [line for line in reported["others"] if "fork_server" not in line]
        forks = end != "ordinary" and bool(preloaded)
        assert len(reported["others"]) - len(other_lines) == forks and reported["forked"] == forks
        if end != "ordinary":
            assert len(other_lines) == 2, "Ray starts nothing that a run does not need"
            assert all("agent_on_demand.py" in line for line in other_lines)
        assert reported["another"] == "raylet", "a worker starts without the fork server, too, if it was killed"
        assert reported["worker_again"] == reported["worker"] and reported["ended"] == [], "a stop signal reached them"
        assert reported["sees"] == ["", "0"], "a worker sees only the GPUs that it requested"
        assert reported["varied"] == "of its own", "Ray's agent makes the environment of a worker that requests one"
        assert list(temporary.iterdir()) == []
        assert process_state(reported["worker"]) in EXITED, "the machine's init reaps it later"
        kept = "".join(file.read_text() for file in logs.glob("worker-*")) if logs.exists() else ""
        assert ("a worker's words" in kept) == (end == "fail")


def test_ray_starts_the_ordinary_way_with_another_version_and_without_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ray_session.can_use_own_node(), "constraints.txt names another Ray than OWN_NODE_RAY"
    monkeypatch.setattr(ray_session, "OWN_NODE_RAY", "1.0")
    assert not ray_session.can_use_own_node() and "Ray 1.0" in capsys.readouterr().err
    monkeypatch.setattr(ray_session, "OWN_NODE_FILE", tmp_path / "own_ray_node.py")
    assert not ray_session.can_use_own_node() and capsys.readouterr().err == ""


UNSTARTED = """
import os, sys
from pathlib import Path
from relax_core.config.compose import load_config
from relax_core.control.host.run_paths import run_paths
from relax_core.control.host.ray_session import RaySession, RayUnstarted

os.environ["RAY_gcs_server_port_wait_time_s"] = "0"  # as on a machine that is too busy for it
logs = Path(sys.argv[1])
with run_paths(run_dir=logs.parent) as paths:
    try:
        with RaySession(load_config().launcher, paths, log_dir=logs):
            pass
    except RayUnstarted as error:
        print(error, flush=True)
    os._exit(0)  # as a controller ends; what is below it is its supervisor's to end
"""


def test_a_timeout_of_ray_is_explained(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ru") as name:
        with subprocess.Popen(
            [sys.executable, "-c", UNSTARTED, str(tmp_path / "logs")],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": name},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            out, _ = process.communicate(timeout=400)
        try:
            assert out.startswith("Ray did not start on this machine ("), out
            assert "launcher.ray_address=auto" in out and f"{tmp_path}/logs." in out
        finally:
            remove_stale_runs(temporary=Path(name))


def test_a_token_file_is_new_and_for_this_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = new_token_file(tmp_path / "token")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text()) == 64
    with pytest.raises(FileExistsError):
        new_token_file(path)
    assert new_token_file(tmp_path / "other").read_text() != path.read_text()


def test_a_run_may_be_prepared_without_importing_ray() -> None:
    code = "import sys, relax_core.control.local_run; print('ray' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split()[0] == "False", done.stderr
