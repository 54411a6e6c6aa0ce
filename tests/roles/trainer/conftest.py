"""Fixtures of the worker group's tests: other ranks, and a bus with groups of several sizes.

The fixtures import the modules that import Ray, because Ray must not be imported before the session has set its token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from relax_core.config.schema import BusConfig
from relax_core.contracts import columns as c
from relax_core.contracts.bus import Group, Lease, LeaseRequest
from relax_core.contracts.tree import TokenTree
from relax_core.roles.role_context import BUS, RunContext
from tests.bus.blocking import BlockingBus
from tests.bus.make_rows import make_settings
from tests.roles.run_context import context_in
from tests.trees import answers_tree, with_tokens

if TYPE_CHECKING:
    pass

ANSWERS = ((9,), (2,), (4,), (7,), (1,), (15, 15, 15, 15))  # for each group on the bus: the number of tokens per answer


@pytest.fixture
def other_ranks(ray_session: str) -> Iterator[list[Any]]:
    import ray

    started: list[Any] = []
    yield started
    for other_rank in started:
        ray.kill(other_rank)


@pytest.fixture(scope="module")
def context(ray_session: str, tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    folder = tmp_path_factory.mktemp("worker_group")
    return replace(context_in(folder), namespace=f"test-{folder.name}")


@pytest.fixture(scope="module")
def bus(context: RunContext) -> Iterator[BlockingBus]:
    """Returns a bus with a group for each entry of `ANSWERS`. The answers of a group share one prompt of 3 rows."""
    from relax_core.bus.factory import create_bus

    made = create_bus(
        BusConfig(name="ray"),
        make_settings(inline_bytes=64, groups_per_step=len(ANSWERS), group_size=4, total_steps=10),
        ledger_path=context.run_dir / "ledger.sqlite",
        name=BUS,
        namespace=context.namespace,
    )
    bus = BlockingBus(made)
    for admission, lengths in zip(bus.admit(len(ANSWERS), timeout_s=60.0), ANSWERS, strict=True):
        first = 100 * admission.index
        ids = np.arange(first, first + 3 + sum(lengths))
        tree = answers_tree(admission.group_uid, ids[:3], lengths, ids[3:])
        tree = with_tokens(tree, advantages=ids[3:] / 8)
        uids = [f"{admission.group_uid}.{sample}" for sample in range(4)]
        kept, dropped = uids[: len(lengths)], dict.fromkeys(uids[len(lengths) :], "failed")
        row = Group(
            group_uid=admission.group_uid,
            index=admission.index,
            uids=kept,
            versions=[0] * len(kept),
            columns=c.encode_tree(tree),
            dropped=dropped,
        )
        bus.put([row], timeout_s=60.0)
    yield bus
    bus.close(reason="the test is over", timeout_s=60.0)
    bus.terminate()


@pytest.fixture(scope="module")
def lease(bus: BlockingBus, context: RunContext) -> Lease:
    """Returns a lease of all groups without tokens, like the lead of several data-parallel ranks. No test ends it."""
    from relax_core.roles.trainer.rank_worker import policy_columns
    from tests.roles.trainer.worker_group_harness import STEP

    return bus.lease(
        LeaseRequest(
            task="actor",
            columns=policy_columns(context.config),
            payloads=c.STRUCTURE_COLUMNS,
            min_groups=len(ANSWERS),
            max_groups=len(ANSWERS),
            step=STEP,
        ),
        timeout_s=60.0,
    )


@pytest.fixture
def groups(bus: BlockingBus, lease: Lease, context: RunContext) -> list[TokenTree]:
    """Returns the complete groups, like the lead rank of one data-parallel rank."""
    from relax_core.roles.trainer.rank_worker import policy_columns

    uids = [row.group_uid for row in lease.rows]
    columns = policy_columns(context.config)
    return [c.decode_tree(row) for row in bus.read(lease.lease_id, uids, columns=columns, timeout_s=60.0)]
