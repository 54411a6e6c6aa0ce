"""The child process of `try_plugins`: ``python -m relax_core.rollout.trial.plugin_trial_main``.

Each plug-in is called as in a run. All functions of an algorithm are called with a made-up group. A data source is
opened twice and must return the same rows both times.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from relax_core.config.reward_choice import ChosenReward, RewardChoice
from relax_core.contracts.algorithm import (
    AdvantageInputs,
    AlgorithmSpec,
    GroupTurns,
    LossInputs,
    Requirements,
    StepTotals,
    ValueInputs,
)
from relax_core.contracts.child_process import OwnerPipe
from relax_core.contracts.data import BaseDataSource
from relax_core.contracts.env import EnvSpec, EpisodeStart
from relax_core.contracts.plugin_results import WrongResult
from relax_core.contracts.reward import RewardInput, RewardOutput, RewardSpec, RewardUnusable
from relax_core.contracts.untrusted_values import clean_text
from relax_core.registry import find_algorithm, find_data_source, find_env, find_reward, plugin_error_text
from relax_core.rollout.env_workers.env_messages import with_sources
from relax_core.rollout.episodes.episode_records import without_bytes
from relax_core.rollout.rewards.reward_sandbox import reward_sandbox
from relax_core.rollout.rewards.reward_worker import RewardWorker
from relax_core.rollout.trial.plugin_trial import START_S, Done, Request, Stage

if TYPE_CHECKING:
    from torch import Generator, Tensor


def try_data_source(request: Request, say: Callable[[Stage], None]) -> Iterator[str]:
    """Yields the first problem of the data source, if any.

    If the source raises for single rows, the check of the data reports these rows and counts them against
    ``data.max_bad_rows``.
    """
    name, packed = request.data
    where = f"data.name={name}"
    say(Stage(what=f"{where}: its import", limit_s=START_S))
    spec = find_data_source(name)
    config = msgspec.msgpack.decode(packed, type=spec.config)
    try:
        say(Stage(what=f"{where}: to open it", limit_s=request.open_s))
        source = spec.open(config)
        rows = _tried_rows(source, where, say, limit_s=request.call_s)
        say(Stage(what=f"{where}: to open it a second time, as another process does", limit_s=request.open_s))
        reopened = spec.open(config)
        if len(source) != len(reopened):
            yield f"{where}: it has {len(source)} rows, and {len(reopened)} when it is opened again. {_SAME}"
            return
        say(Stage(what=f"{where}: its held-out rows", limit_s=request.open_s))
        reopened.held_out()
        again = _tried_rows(reopened, where, say, limit_s=request.call_s)
    except WrongResult as error:
        yield f"{where}: {error}"
        return
    except Exception as error:  # plug-in code: every error is reported
        yield f"{where}: it cannot be opened: {plugin_error_text(error)}"
        return
    if changed := [number for number, row in rows.items() if again[number] != row]:
        yield f"{where}: row {changed[0]} differs when the source is opened again. {_SAME}"
    elif (problem := _no_data(rows, where)) is not None:
        yield problem


_SAME = "The same number must give the same row in every process, because a run may be resumed."


def _tried_rows(source: BaseDataSource, where: str, say: Callable[[Stage], None], *, limit_s: float) -> dict[int, Any]:
    """Returns the first row, a row in the middle and the last row by number; None if the source raises for a row.

    Raises `WrongResult` if a value is not a row.
    """
    rows: dict[int, Any] = {}
    say(Stage(what=f"{where}: its number of rows", limit_s=limit_s))
    for number in sorted({0, len(source) // 2, len(source) - 1}):
        say(Stage(what=f"{where}: row {number}", limit_s=limit_s))
        try:
            rows[number] = source[number]
        except WrongResult:
            raise
        except Exception:  # plug-in code: the check of the data reports the error
            rows[number] = None
    return rows


def _no_data(rows: dict[int, Any], where: str) -> str | None:
    for number, row in rows.items():
        try:
            msgspec.msgpack.encode(row)
        except TypeError as error:
            return f"{where}: row {number}: {error}. A row holds text, numbers, lists and mappings."
    return None


SAMPLES = 8  # the largest number of samples in the group
TOKENS = 3  # tokens per sample


def try_algorithm(spec: AlgorithmSpec, config: Any) -> None:
    """Calls every function of ``spec`` on the CPU, with tensors that follow the contract.

    Half of the rewards are 0 and half are 1, log-probs are near -1, and all tokens are trained. Raises the errors of
    the functions, and `WrongResult` for wrong results.
    """
    import torch

    requirements = spec.requirements(config)
    samples = min(SAMPLES, config.group_size)
    random = torch.Generator().manual_seed(0)
    group = _made_up_group(requirements, samples, random)
    tokens = samples * TOKENS
    advantages = spec.advantages(group, config)
    returns = advantages if spec.returns is None or not requirements.critic else spec.returns(group, advantages, config)
    if spec.normalize is not None and requirements.whole_step:
        advantages = spec.normalize([advantages], [group], config)[0]
    if spec.drop_group is not None:
        spec.drop_group(group.rewards.tolist(), 0, config)
    spec.denominator(StepTotals(tokens=tokens, samples=samples, groups=1), config)
    top_k = 0 if requirements.teacher is None else requirements.teacher.top_k
    old_logprobs = group.old_logprobs
    assert old_logprobs is not None
    outputs = spec.loss(
        LossInputs(
            logprobs=_logprobs(tokens, random).requires_grad_(),
            old_logprobs=old_logprobs,
            rollout_logprobs=old_logprobs,
            advantages=advantages,
            loss_mask=group.loss_mask,
            sample_ids=group.sample_ids,
            num_samples=samples,
            reference_logprobs=group.reference_logprobs,
            teacher_logprobs=group.teacher_logprobs,
            entropy=torch.ones(tokens, requires_grad=True) if requirements.entropy else None,
            teacher_top_logprobs=torch.full((tokens, top_k), -2.0) if top_k else None,
            top_logprobs=torch.full((tokens, top_k), -2.0, requires_grad=True) if top_k else None,
        ),
        config,
    )
    outputs.loss_sum.backward()
    if requirements.critic and spec.value_loss is not None:
        values = torch.zeros(tokens, requires_grad=True)
        spec.value_loss(
            ValueInputs(
                values=values,
                old_values=torch.zeros(tokens),
                returns=returns,
                loss_mask=group.loss_mask,
                sample_ids=group.sample_ids,
                num_samples=samples,
            ),
            config,
        ).loss_sum.backward()


def _made_up_group(requirements: Requirements, samples: int, random: Generator) -> AdvantageInputs:
    import torch

    tokens = samples * TOKENS
    rollout = _logprobs(tokens, random)
    return AdvantageInputs(
        rewards=(torch.arange(samples) % 2).float(),
        lengths=torch.full((samples,), TOKENS),
        loss_mask=torch.ones(tokens, dtype=torch.bool),
        sample_ids=torch.repeat_interleave(torch.arange(samples), TOKENS),
        old_logprobs=rollout,
        rollout_logprobs=rollout,
        reference_logprobs=_logprobs(tokens, random) if requirements.reference else None,
        teacher_logprobs=_logprobs(tokens, random) if requirements.teacher is not None else None,
        values=torch.zeros(tokens) if requirements.critic else None,
        turns=_made_up_turns(samples) if requirements.needs_turns else None,
    )


def _made_up_turns(samples: int) -> GroupTurns:
    """Returns two turns per sample, with one and two tokens; all first turns begin in the same state."""
    import torch

    turns = torch.arange(2 * samples)
    return GroupTurns(
        of_tokens=turns.repeat_interleave(torch.tensor([1, TOKENS - 1]).repeat(samples)),
        samples=turns // 2,
        rewards=(turns % 2 * (turns // 2 % 2)).double(),
        state_keys=[f"{turn // 2} later" if turn % 2 else "first" for turn in turns.tolist()],
    )


def _logprobs(tokens: int, random: Generator) -> Tensor:
    import torch

    return -1.0 + 0.1 * torch.rand(tokens, generator=random)


ALGORITHM_S = 60.0
_IN_SANDBOX = (
    " It ran in the sandbox, without a network, variables and files of yours: name files that it reads by reads=… in "
    "its SPEC, or use reward.sandbox=none."
)
MAX_PROBLEM = 10_000  # characters


def main() -> None:
    """Reads a `Request` from stdin, tries the plug-ins, and writes a `Stage` before each call and `Done` at the end."""
    replies = OwnerPipe()
    request = msgspec.msgpack.decode(replies.read(), type=Request)
    problems = [
        *(try_data_source(request, partial(_send, replies)) if request.data[0] else ()),
        *(_try_env(request, replies) if request.env[0] else ()),
        *(_try_reward(request, replies) if request.reward[0] else ()),
        *(_try_algorithm(request, replies) if request.algo[0] else ()),
    ]
    _send(replies, Done(problems=problems))


def _send(replies: OwnerPipe, message: Stage | Done) -> None:
    if isinstance(message, Done):
        message = Done(problems=[clean_text(problem, MAX_PROBLEM) for problem in message.problems])
    replies.write(message)


def _try_env(request: Request, replies: OwnerPipe) -> Iterator[str]:
    """Yields a problem if the env returns a wrong type, or if an env of several turns raises for every data row.

    If an env raises for single rows, the check of the data reports these rows and counts them against
    ``data.max_bad_rows``.
    """
    name, packed = request.env
    _send(replies, Stage(what=f"env.name={name}: its import", limit_s=START_S))
    spec = find_env(name)
    config = msgspec.msgpack.decode(packed, type=spec.config)
    if spec.agent is not None:  # agents play this env, and only a run starts agents
        return
    failed: list[str] = []
    for where, sent in request.rows:
        row = with_sources(sent)
        try:
            if spec.messages is not None:
                _send(replies, Stage(what=f"env.name={name}: messages for {where}", limit_s=request.call_s))
                spec.messages(row, config)
            else:
                asyncio.run(_open_once(spec, row, config, partial(_send_call, replies, request, config, where)))
        except WrongResult as error:
            yield f"env.name={name}: {where}: {error}"
            return
        except Exception as error:  # plug-in code: the check of the data reports the error for each row
            failed.append(f"env.name={name}: {where}: {plugin_error_text(error)}")
    if spec.has_turns and failed and len(failed) == len(request.rows):
        yield failed[0]


def _send_call(replies: OwnerPipe, request: Request, config: Any, where: str, call: str) -> None:
    """Announces a call of an env with turns; the limit is at least the limit in a run."""
    what = f"env.name={config.name}: {call} for {where}"
    limit_s = request.call_s
    if config.step_timeout_s > limit_s:
        what, limit_s = f"{what} (raise env.step_timeout_s, or make it faster)", config.step_timeout_s
    _send(replies, Stage(what=what, limit_s=limit_s))


async def _open_once(spec: EnvSpec, row: Mapping[str, Any], config: Any, begins: Callable[[str], None]) -> None:
    """Opens an episode with its tools, and closes it; makes no step, because a step needs a response of a model.

    ``begins`` is called with the name of each call before the call.
    """
    assert spec.open is not None
    if spec.tools is not None:
        begins("its tools")
        spec.tools(row, config)
    begins("its opening")
    env = spec.open(EpisodeStart(row=row, group_seed=0, episode_seed=0), config)
    try:
        begins("reset")
        observation = await _result(env.reset())
        begins("format_observation")
        await _result(env.format_observation(observation))
    finally:
        begins("close")
        await _result(env.close())


async def _result(returned: Any) -> Any:
    return await returned if inspect.isawaitable(returned) else returned


def _try_reward(request: Request, replies: OwnerPipe) -> Iterator[str]:
    """Yields a problem if a reward returns a wrong type, or if no data row gets a reward from it."""
    name, packed = request.reward
    _send(replies, Stage(what=f"reward.name={name}: its import", limit_s=START_S))
    spec = find_reward(name)
    choice = RewardChoice(spec, msgspec.msgpack.decode(packed, type=spec.config))
    rows: dict[ChosenReward, list[tuple[str, dict[str, Any]]]] = {}
    for where, row in request.rows:
        try:
            scorers = choice.scorers(row)
        except ValueError:  # the check of the data reports rows with an unknown reward
            continue
        for chosen in scorers:
            if chosen.spec.judges is None:  # a reward with judges needs the engines of the judges
                rows.setdefault(chosen, []).append((where, row))
    for chosen, its in rows.items():
        yield from _try_on_rows(choice, chosen, its, request, replies)


def _try_on_rows(
    choice: RewardChoice,
    chosen: ChosenReward,
    rows: Sequence[tuple[str, dict[str, Any]]],
    request: Request,
    replies: OwnerPipe,
) -> Iterator[str]:
    spec, config = chosen.spec, chosen.config
    name = f"reward.name={config.name}"
    has_turns = bool(request.env[0]) and find_env(request.env[0]).has_turns
    _send(replies, Stage(what=f"{name}: its libraries", limit_s=START_S))
    sandbox = reward_sandbox(choice, [chosen]) if spec.isolated else None
    if sandbox is None and (problem := _problem(spec.prepare, f"{name}: prepare")) is not None:
        yield problem
        return
    first = ""
    with ExitStack() as stack:
        score = partial(_first_output, spec, config)
        if sandbox is not None:  # reference answers are also scored only in the sandbox
            worker = RewardWorker([config], log=None, sandbox=sandbox)
            stack.callback(worker.process.stop)
            score = partial(_first_of_worker, worker, config)
        for where, row in rows:
            answer = str(row["answer"])
            given = RewardInput(response=answer, stopped=True, answer=answer, row=without_bytes(with_sources(row)))
            what = f"{name}: the score of {where}, with its own answer as the response"
            answers = 1 if spec.score is not None else 2
            limit_s = max(request.call_s, config.timeout_s * answers)
            _send(replies, Stage(what=what, limit_s=limit_s if sandbox is None else limit_s + START_S))
            try:
                output = score([given] * answers)
            except (WrongResult, RewardUnusable) as error:
                yield f"{name}: {error}"
                return
            except Exception as error:  # plug-in code: the error is reported if no row has a reward
                first = first or f"{what}: {plugin_error_text(error)}"
                continue
            if output.reward is not None or has_turns:  # for an env with turns, this reward lacks the rewards of turns
                return
            first = first or f"{what}: no reward: {output.reason or 'None without a reason'}"
    several = "" if len(rows) < 2 else f" None of the {len(rows)} rows that were tried has a reward."
    yield f"{first.removesuffix('.')}.{several}{'' if sandbox is None else _IN_SANDBOX}"


def _first_of_worker(worker: RewardWorker, config: Any, given: Sequence[RewardInput]) -> RewardOutput:
    """Returns the worker's first output for a row's answers; raises RuntimeError if the worker does not start."""
    return worker.score(given, config)[0]


def _first_output(spec: RewardSpec, config: Any, given: Sequence[RewardInput]) -> RewardOutput:
    """Returns the first output. A group reward gets the answer twice, which reveals an output list of wrong length."""
    result: Any = spec.score(given[0], config) if spec.score is not None else spec.score_group(given, config)  # type: ignore[misc]
    if spec.is_async:
        result = asyncio.run(result)
    output = result if spec.score is not None else result[0]
    assert isinstance(output, RewardOutput), "the registry checks the result of a reward"
    return output


def _try_algorithm(request: Request, replies: OwnerPipe) -> Iterator[str]:
    name, packed = request.algo
    _send(replies, Stage(what=f"algo.name={name}: its import", limit_s=START_S))
    spec = find_algorithm(name)
    config = msgspec.msgpack.decode(packed, type=spec.config)
    import torch  # noqa: F401

    _send(replies, Stage(what=f"algo.name={name}: a made-up group from its rewards to a loss", limit_s=ALGORITHM_S))
    problem = _problem(lambda: try_algorithm(spec, config), f"algo.name={name}, tried on a made-up group")
    yield from [problem] if problem is not None else []


def _problem(call: Callable[[], Any], what: str) -> str | None:
    try:
        call()
    except Exception as error:  # plug-in code: every error is reported
        return f"{what}: {plugin_error_text(error)}"
    return None


if __name__ == "__main__":
    main()
