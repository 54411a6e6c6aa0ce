"""Runs one rank: joins the ranks, waits for a line on stdin, makes another group and gathers objects.

python store_rank.py <rank> <address> <token> <seconds during which the second group lets everybody connect>
"""

import json
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from relax_core.train.process_group import OneDeviceGloo, UntrustedRank, admitting_ranks, share_gloo_device
from relax_core.weights.weight_group import open_rank_store


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


def main() -> None:
    rank, address, token, open_s = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
    timeout = timedelta(seconds=20)
    store = open_rank_store(address, token="store", rank=rank, world_size=2, timeout_s=20.0)
    share_gloo_device(token=token)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
        say(ports=sorted(OneDeviceGloo._listeners))
        sys.stdin.readline()
        began = time.monotonic()
        if open_s:
            with admitting_ranks():
                time.sleep(open_s)
                began = time.monotonic()
                group = dist.new_group(backend="gloo", timeout=timeout)
        else:
            group = None
        slowest = 0.0
        for _ in range(50):
            gathered: list[object] = [None, None]
            dist.all_gather_object(gathered, {"rank": rank}, group=group)
            slowest, began = max(slowest, time.monotonic() - began), time.monotonic()
        say(gathered=gathered, slowest=slowest)
        sys.stdin.readline()
    except (UntrustedRank, RuntimeError) as error:
        say(error=type(error).__name__, text=str(error))


if __name__ == "__main__":
    main()
