"""Tests a rank that has joined: its store is closed to the network, and its random streams are seeded."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.integration.live_run import NOBODY, as_user

SCRIPT = """
import random
import sys
from pathlib import Path
import numpy as np
import torch
from relax_core.config.schema import ParallelConfig
from relax_core.train import process_group

layout = ParallelConfig(dp=1, tp=1, pp=1, vpp=1, cp=1, ep=1, etp=1, sequence_parallel=False)
process_group.join(layout, rank=0, world_size=1, store_address="127.0.0.1:0", timeout_s=30.0, seed=7)
print("draws", random.random(), np.random.random(), torch.rand(1).item())
for task in Path("/proc/self/task").iterdir():
    print("thread", (task / "comm").read_text().strip())
mine = {str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
for table in ("tcp", "tcp6"):
    for line in Path("/proc/net", table).read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
            print("listens", fields[1].split(":")[0])
"""


@pytest.fixture(scope="module", params=[os.getuid(), NOBODY], ids=["this user", "nobody"])
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Returns the words of each line that a rank printed. On some kernels only root may filter a socket."""
    prefix, home = [], tmp_path_factory.mktemp("home")
    if request.param != os.getuid():
        if os.getuid() != 0 or shutil.which("setpriv") is None:
            pytest.skip("needs root and setpriv to become another user")
        prefix = as_user(request.param)
        os.chown(home, request.param, request.param)
    done = subprocess.run(
        [*prefix, sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home), "TMPDIR": str(home)},
    )
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's socket table")
def test_everything_listens_on_loopback_only(said: list[list[str]]) -> None:
    assert {words[1] for words in said if words[0] == "listens"} == {"0100007F"}


def test_all_groups_share_one_thread_that_waits_for_the_network(said: list[list[str]]) -> None:
    assert [words[1] for words in said if words[0] == "thread"].count("gloo_tcp_loop") == 1


def test_every_random_stream_that_a_checkpoint_keeps_begins_with_the_seed(said: list[list[str]]) -> None:
    generator = torch.Generator().manual_seed(7)
    wanted = [
        random.Random(7).random(),
        np.random.RandomState(7).random_sample(),
        torch.rand(1, generator=generator).item(),
    ]
    (draws,) = ([float(word) for word in words[1:]] for words in said if words[0] == "draws")
    assert draws == wanted
