"""Implements the workers that run judge engines, and the client pool that sends the rollout's requests to judges."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from relax_core.config.choices import ModeName
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.engine import SILENT_S, EngineError
from relax_core.contracts.judge import JudgeSetup
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.engine_process import EngineLaunch
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.roles.engine_directory import EngineDirectory
from relax_core.roles.engine_owner import EngineOwner
from relax_core.roles.role_context import JUDGE_ENGINE, RunContext
from relax_core.rollout.judges.judge_choice import judge_engine, judge_engines, judge_plan, judge_positions
from relax_core.rollout.judges.judge_pool import JudgePool, RunJudge
from relax_core.rollout.judges.judge_servers import JudgeEngines, JudgeServer, JudgeUrl


def _judge_context(context: RunContext, judge: str) -> RunContext:
    """Returns a context for a judge's engines and their clients.

    Its configuration describes the judge's engines where the run's context describes the run's engines.
    """
    config, folder = context.config, context.judge_folders[judge]
    engine = judge_engine(config.engine, _setups(config)[judge].settings, positions=judge_positions(folder))
    return replace(context, config=replace(config, engine=engine), model_folder=folder, media_folder=None)


def _setups(config: RelaxConfig) -> dict[str, JudgeSetup]:
    plan = judge_plan(config)
    assert plan is not None, "this run's reward calls judges"
    return dict(plan.judges)


class JudgeEngineOwner(EngineOwner):
    """Owns judge engine ``rank``, in the order of `relax_core.rollout.judges.judge_choice.judge_engines`.

    The engine serves the judge's weights from its start and never gets different weights. With mode=colocate an idle
    engine releases its KV cache, so only its weights are in memory while the policy trains.
    """

    def __init__(self, name: str, context: RunContext, rank: int) -> None:
        super().__init__(name, _judge_context(context, judge_engines(context.config)[rank]), rank)

    def _engine_launch(self, port: int) -> EngineLaunch:
        launch = super()._engine_launch(port)
        return replace(
            launch,
            family=None,
            load_weights=True,
            return_routed_experts=False,
            stop_strings=False,
            media_folder=None,
            shard_media=False,
        )

    def _first_port(self) -> int:
        return 0

    def _reconcile(self, client: EngineClient) -> None:
        if self.context.config.mode.name is ModeName.colocate:
            try:
                _free_if_idle(client)
            except EngineError as error:
                self.set_state("waiting", str(error))
                return
        self.set_state("running", self._url)


def _free_if_idle(client: EngineClient) -> None:
    """Frees the KV cache of an engine without prompts. The engine allocates it again for the next prompt."""
    load = client.loads()
    if load.get("kv_cache_bytes") and not any(load[key] for key in ("running", "queued", "held")):
        client.release_memory()
        client.resume_memory()


def run_judges(context: RunContext) -> JudgePool:
    """Returns the client pool of a run's judges. The pool belongs to the event loop that uses it first."""
    config = context.config
    ranks = judge_engines(config)
    judges = {}
    for name, setup in _setups(config).items():
        numbers = [rank for rank, of in enumerate(ranks) if of == name]
        server: JudgeServer = (
            JudgeUrl(setup.settings) if setup.settings.url is not None else _engines(context, name, setup, numbers)
        )
        judges[name] = RunJudge(name, setup, server, seed=config.seed)
    return JudgePool(judges)


def _engines(context: RunContext, judge: str, setup: JudgeSetup, ranks: list[int]) -> JudgeEngines:
    its_context = _judge_context(context, judge)
    engine, folder = its_context.config.engine, its_context.model_folder
    directory = EngineDirectory(
        its_context, role=JUDGE_ENGINE, model_folders=[folder] * len(judge_engines(context.config))
    )
    pool = EnginePool(
        len(ranks),
        partial(_client_of, directory, ranks),
        timeout_s=engine.start_timeout_s + setup.settings.timeout_s,
        silent_s=SILENT_S,
        on_malformed=partial(_report_malformed, directory, ranks),
    )
    return JudgeEngines(
        judge,
        setup.settings,
        pool,
        model_folder=folder,
        context_tokens=engine.context_tokens,
        date=context.config.data.template_date,
    )


async def _report_malformed(directory: EngineDirectory, ranks: list[int], engine: int, why: str) -> None:
    await directory.report_malformed(ranks[engine], why)


async def _client_of(directory: EngineDirectory, ranks: list[int], engine: int, refresh: bool) -> EngineClient:
    return await directory.client_async(ranks[engine], refresh)
