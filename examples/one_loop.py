"""Runs the whole RL loop in one process. Read it from top to bottom, and run it with `python examples/one_loop.py`.

A tiny Qwen3 learns to reverse five digits. The loop uses the parts of a real run. A real run adds separate processes
for the parts (Ray), a ledger on disk, and restarts after failures. Here only the engine is a second process. The loop
is strictly on-policy: step t trains exactly the samples of weight version t. `docs/one_step.md` describes the same ten
steps.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist

from relax_core.bus.ledger import Ledger
from relax_core.bus.replay_buffer import ReplayBuffer
from relax_core.bus.settings import BusSettings
from relax_core.config.compose import load_config
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.bus import Admission, Lease, LeaseRequest
from relax_core.contracts.columns import ADVANTAGES, ROLLOUT_COLUMNS
from relax_core.contracts.data import BadRow
from relax_core.contracts.engine import PromptRequest
from relax_core.contracts.train import StepMetrics
from relax_core.contracts.tree import TokenTree
from relax_core.data.sources import make_source
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.build_client import build_client
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.preflight import CHECKS, settle
from relax_core.registry import find_algorithm, find_env, find_reward
from relax_core.rollout.episodes.episode_records import score_episodes
from relax_core.rollout.episodes.group_assembly import DroppedGroup, complete_group
from relax_core.rollout.episodes.group_player import OneTurnPlayer
from relax_core.rollout.group_advantages import advantage_extras
from relax_core.rollout.prompt_tokens import AdmittedPrompt, PromptMaker, sampling_seed
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.rollout.sampling_params import training_sampling
from relax_core.tools.make_tiny import tiny_model_folder
from relax_core.train.megatron_rank import rank_setup
from relax_core.train.micro_batches import MicroBatcher, decode_train_tree
from relax_core.train.policy_backend import MegatronBackend
from relax_core.weights.version_file import write_weights

COLUMNS = (*ROLLOUT_COLUMNS, ADVANTAGES)  # columns of a group that the trainer reads
STRICT = ("run.steps=30", "eval.every=0", "mode=async", "mode.max_staleness=0")


@dataclass(frozen=True, kw_only=True)
class LoopMetrics:
    """Holds the metrics of one step.

    ``versions`` are the weight versions of the trained tokens, ``logprob_gap`` is the largest log-prob difference
    between engine and trainer, and ``ratio`` is the mean importance ratio.
    """

    step: int
    reward: float
    exact: float
    versions: set[int]
    logprob_gap: float
    ratio: float

    def line(self) -> str:
        rewards = f"reward {self.reward:.3f}  exact {self.exact:.3f}"
        trust = f"log-prob gap {self.logprob_gap:.1e}  ratio {self.ratio:.6f}  sampled by weights {self.versions}"
        return f"step {self.step:<2d}  {rewards}  {trust}"


class Loop:
    """Holds the parts of a run and runs the train steps."""

    def __init__(self, config: RelaxConfig, *, engine: EngineClient, model_folder: Path, scratch: Path) -> None:
        self.config, self.engine, self.scratch = config, engine, scratch
        self.algorithm = find_algorithm(config.algo.name)
        # The source provides data rows in an endless, seeded order. Env and chat template turn a row into a prompt.
        self.source = make_source(config.data, seed=config.seed, eval_rows=0)
        self.prompts = PromptMaker(
            env=find_env(config.env.name),
            env_config=config.env,
            tokenizer=PromptTokenizer(model_folder),
            max_prompt_tokens=config.engine.context_tokens - config.rollout.max_new_tokens,
        )
        self.sampling = training_sampling(config, self.prompts.tokenizer)
        # The bus admits groups, stores complete groups, and records the end of every episode.
        self.bus = ReplayBuffer(
            BusSettings(
                groups_per_step=config.rollout.prompts_per_step,
                group_size=config.algo.group_size,
                max_staleness=config.mode.max_staleness,
                on_stale="drop",
                total_steps=config.run.steps,
            ),
            ledger=Ledger(group_size=config.algo.group_size, journal=None),
            clock=time.monotonic,
        )
        # The trainer: Megatron, one rank on this machine.
        setup = rank_setup(config, model_folder=model_folder, rank=0, store_address="127.0.0.1:0")
        self.trainer = MegatronBackend(setup, temperature=config.rollout.temperature)

    async def run(self) -> list[LoopMetrics]:
        """Runs all steps. First publishes weight version 0, because the engine cannot sample without weights."""
        figures = []
        self.publish(version=0)
        with RewardPool(find_reward(self.config.reward.name), self.config.reward, workers=1) as rewards:
            pool = EnginePool(1, self.the_engine, timeout_s=self.config.engine.start_timeout_s)
            player = OneTurnPlayer(prompts=self.prompts, pool=pool, sampling=self.sampling)
            for step in range(self.config.run.steps):
                await self.sample(player, rewards)
                lease, trees = self.take_rows(step)
                metrics = self.train(step, trees)
                self.publish(version=step + 1)
                self.bus.ack([lease.lease_id], step=step, dropped={})
                figures.append(metrics_of(step, trees, metrics))
                print(figures[-1].line(), flush=True)
        await self.engine.aclose()
        return figures

    # -- 1 to 5: from data rows to complete groups ------------------------------------------------------------------
    async def sample(self, player: OneTurnPlayer, rewards: RewardPool) -> None:
        """Fills the bus for one step: prompts, responses, rewards, groups. A group without a learning signal is dropped
        with a reason, and the bus admits another group for it.
        """
        while missing := self.config.rollout.prompts_per_step - self.bus.progress().waiting:
            prompts = [self.prompt(admission) for admission in self.bus.admit(missing)]
            async with asyncio.TaskGroup() as tasks:
                async for prompt, episodes in player.groups(prompts, tasks):
                    assert not isinstance(episodes, BadRow), "only an env of several turns finds a bad row this late"
                    await score_episodes(episodes, rewards, row=prompt.row, where=prompt.where)
                    done = complete_group(index=prompt.index, episodes=episodes, extras=self.advantages)
                    if isinstance(done, DroppedGroup):
                        self.bus.drop(done.group_uid, reason=done.reason)
                    else:
                        self.bus.put([done])

    def prompt(self, admission: Admission) -> AdmittedPrompt:
        """Returns one group's prompt.

        The engine samples it as soon as its weight version is at least ``min_version``.
        """
        row, where = self.source.row(admission.index), self.source.where(self.source.number(admission.index))
        request = PromptRequest(
            rid=admission.group_uid,
            input_ids=self.prompts.tokens(row, where=where),
            sampling_seed=sampling_seed(self.config.seed, index=admission.index),
            min_version=admission.min_version,
        )
        return AdmittedPrompt(index=admission.index, row=row, where=where, request=request)

    def advantages(self, tree: TokenTree) -> Mapping[str, np.ndarray]:
        """Returns the advantages of a complete group's tokens."""
        return advantage_extras([tree], self.algorithm, self.config.algo)[0]

    # -- 6 to 8: from complete groups to an update ------------------------------------------------------------------
    def take_rows(self, step: int) -> tuple[Lease, list[TokenTree]]:
        """Leases the step's groups and reads the rollout's arrays without a copy."""
        groups = self.config.rollout.prompts_per_step
        lease = self.bus.lease(
            LeaseRequest(task="actor", columns=COLUMNS, min_groups=groups, max_groups=groups, step=step)
        )
        assert lease is not None, "`sample` has put all groups of the step"
        oldest = step - self.config.mode.max_staleness
        return lease, [decode_train_tree(row, step=step, oldest_version=oldest)[0] for row in lease.rows]

    def train(self, step: int, trees: Sequence[TokenTree]) -> StepMetrics:
        """Trains one step: forward and backward passes over micro-batches, then one optimizer step."""
        self.trainer.begin_step(step)
        batcher = MicroBatcher(self.config.parallel.micro_batch_tokens)
        for batch in (*batcher.add(trees), batcher.flush()):
            self.trainer.accumulate(batch)
        return self.trainer.finish_step()

    # -- 9 and 10: back to the engine -------------------------------------------------------------------------------
    def publish(self, *, version: int) -> None:
        """Writes the weights to one file with digests.

        The engine serves this version after it has verified the digests.
        """
        file = self.scratch / f"weights-{version % 2}.safetensors"  # two files, so the file in use is not overwritten
        self.engine.update_weights(write_weights(file, version=version, tensors=self.trainer.export()))

    async def the_engine(self, engine: int, refresh: bool) -> EngineClient:
        return self.engine


def metrics_of(step: int, trees: Sequence[TokenTree], metrics: StepMetrics) -> LoopMetrics:
    episodes = [episode for tree in trees for episode in tree.episodes]
    return LoopMetrics(
        step=step,
        reward=float(np.mean([episode.reward for episode in episodes])),
        exact=float(np.mean([episode.parts["exact"] for episode in episodes])),
        versions={int(version) for tree in trees for version in np.unique(tree.versions[tree.loss_mask])},
        logprob_gap=metrics.logprob_gap_max,
        ratio=metrics.algorithm["ratio"],
    )


@contextmanager
def engine_in_subprocess(config: RelaxConfig, *, model_folder: Path, scratch: Path) -> Iterator[EngineClient]:
    """Starts an engine process. It ends after the block, and also if this process is killed."""
    token_file = scratch / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(secrets.token_hex(32))
    launch = EngineLaunch(
        model_folder=model_folder,
        engine=config.engine,
        dtype=config.model.dtype,
        token_file=token_file,
        log_file=scratch / "engine.log",
    )
    process = EngineProcess.start(launch)
    client = build_client(config.engine, process.url, model_folder=model_folder, token_file=token_file)
    try:
        yield client
    finally:
        client.close()
        process.stop(timeout_s=5.0)


def train(*overrides: str) -> list[LoopMetrics]:
    """Runs the loop in a temporary folder. ``overrides`` are the same as on the command line of a run."""
    config = load_config([*STRICT, *overrides], checks=CHECKS, settle=settle)
    assert config.model.builtin is not None and config.model.task is not None, "the default model is built in"
    model_folder = tiny_model_folder(config.model.builtin, task=config.model.task)
    with tempfile.TemporaryDirectory(prefix="relax-one-loop-") as folder:
        scratch = Path(folder)
        with engine_in_subprocess(config, model_folder=model_folder, scratch=scratch) as engine:
            loop = Loop(config, engine=engine, model_folder=model_folder, scratch=scratch)
            try:
                return asyncio.run(loop.run())
            finally:
                print("episodes:", loop.bus.progress().ledger)
                dist.destroy_process_group()


if __name__ == "__main__":
    train(*sys.argv[1:])
