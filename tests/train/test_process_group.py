"""The ranks' meeting place must not be open to the network: it asks nobody for a token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
from relax_core.config.schema import ParallelConfig
from relax_core.train import process_group

layout = ParallelConfig(dp=1, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1, sequence_parallel=False)
process_group.join(layout, rank=0, world_size=1, store_address="127.0.0.1:0", timeout_s=30.0, seed=0)
mine = {str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
for table in ("tcp", "tcp6"):
    for line in Path("/proc/net", table).read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
            print("listens", fields[1].split(":")[0])
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's socket table")
def test_everything_listens_on_loopback_only() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=300)
    addresses = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("listens")}
    assert addresses == {"0100007F"}
