"""Tests that the Ray of a run listens on loopback only (docs/security.md)."""

from __future__ import annotations

import ipaddress
import json
import subprocess
import sys
from pathlib import Path

SESSION = """
import json, sys
from pathlib import Path
from relax_core.config.compose import load_config
from relax_core.control.host.run_paths import run_paths
from relax_core.control.host.ray_session import RaySession

logs = Path(sys.argv[1])
with run_paths(run_dir=logs) as place, RaySession(load_config([]).launcher, place, log_dir=logs):
    import psutil, ray

    @ray.remote
    class Worker:
        def here(self):
            return True

    worker = Worker.remote()
    assert ray.get(worker.here.remote(), timeout=300)
    own = {psutil.Process().pid, *(child.pid for child in psutil.Process().children(recursive=True))}
    found = [c.laddr.ip for c in psutil.net_connections("inet") if c.status == "LISTEN" and c.pid in own]
print(json.dumps(found))
"""


def test_ray_listens_on_loopback_only(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", SESSION, str(tmp_path)], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    addresses = [ipaddress.ip_address(address) for address in json.loads(done.stdout.splitlines()[-1])]
    assert addresses, "Ray listens somewhere"
    beyond = [
        str(address) for address in addresses if not (getattr(address, "ipv4_mapped", None) or address).is_loopback
    ]
    assert not beyond, f"Ray listens on {beyond}"
