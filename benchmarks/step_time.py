"""Compares the plan's step times with published step times of other systems on GPUs.

    python -m benchmarks.step_time [--fit] [--json FILE]

Relax has not run on several GPUs, so its estimates (relax_core/plan/step_time.py) use efficiencies that were fitted to
the rows of `FITTED`: NeMo RL's table for H100; its recipes give layouts, batches and engines. All other rows were not
used in the fit: the same table for GB200, rows of an older release, and verl's table for H20. ``--fit`` repeats the fit
over a grid and prints the best values, without changing the code. It takes a minute.

verl's page has no mean length and no engine layout. The length of each of its rows is chosen to make the estimate of
`update_actor` right. So only its other numbers can be compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from relax_core.config.choices import GpuName
from relax_core.config.schema import ForwardLayout, ParallelConfig
from relax_core.plan.gpu_models import GPU_MODELS
from relax_core.plan.model_dimensions import ModelDimensions, shape_dimensions
from relax_core.plan.step_time import (
    EFFICIENCY,
    Efficiency,
    Engines,
    PassSeconds,
    Rows,
    batch_rollout_seconds,
    pass_flops,
    pass_seconds,
    steady_rollout_seconds,
)

PROMPT = 120  # tokens: NeMo RL's tokens per second times its seconds, less its mean response
FORWARDS = 2  # log-probs of the policy and of the reference; both are passes of the trainer's GPUs
MAX_RUNNING = 256  # vLLM's default number of sequences
NEMO = "https://docs.nvidia.com/nemo/rl/0.6.0/about/performance-summary.html"
VERL = "https://verl.readthedocs.io/en/latest/advance/fully_async.html"


@dataclass(frozen=True, kw_only=True)
class Published:
    """Holds a row of NeMo RL's table, completed by its recipe.

    ``engine_gpus`` is 0 if trainer and engines alternate on the same GPUs, and else they are ``ahead`` steps apart.
    ``domain`` GPUs share fast links. ``response`` is the mean length, and ``context`` the maximum of prompt and
    response. ``updates`` are the updates of a step.
    """

    release: str
    model: str
    gpu: GpuName
    trainer_gpus: int
    engine_gpus: int
    ahead: int
    tp: int
    cp: int
    pp: int
    ep: int
    engine_tp: int
    samples: int
    response: int
    context: int
    updates: int
    recompute: bool
    seconds: float
    domain: int = 8

    @property
    def name(self) -> str:
        """Returns the row's name in the table."""
        split = f"{self.trainer_gpus}+{self.engine_gpus}" if self.engine_gpus else str(self.trainer_gpus)
        return f"{self.model}, {split} {self.gpu.value}, {f'{self.ahead}-step off' if self.ahead else 'on policy'}"


def _llama(gpus: int, engines: int, *, response: int, seconds: float) -> Published:
    return Published(
        release="0.4",
        model="Llama-3.1-8B",
        gpu=GpuName.h100,
        trainer_gpus=gpus,
        engine_gpus=engines,
        ahead=int(engines > 0),
        tp=1,
        cp=1,
        pp=2,
        ep=1,
        engine_tp=1,
        samples=2048,
        response=response,
        context=4096,
        updates=4,
        recompute=True,
        seconds=seconds,
    )


def _qwen_32b(gpus: int, engines: int, *, response: int, seconds: float) -> Published:
    return Published(
        release="0.4",
        model="Qwen3-32B",
        gpu=GpuName.h100,
        trainer_gpus=gpus,
        engine_gpus=engines,
        ahead=int(engines > 0),
        tp=4,
        cp=1,
        pp=4,
        ep=1,
        engine_tp=4,
        samples=2048,
        response=response,
        context=4096,
        updates=4,
        recompute=False,
        seconds=seconds,
    )


def _qwen_30b(
    gpus: int,
    engines: int,
    *,
    response: int,
    seconds: float,
    release: str = "0.6",
    ahead: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 8,
    engine_tp: int = 2,
    gpu: GpuName = GpuName.h100,
    domain: int = 8,
) -> Published:
    return Published(
        release=release,
        model="Qwen3-30B-A3B",
        gpu=gpu,
        trainer_gpus=gpus,
        engine_gpus=engines,
        ahead=ahead if engines else 0,
        tp=tp,
        cp=1,
        pp=pp,
        ep=ep,
        engine_tp=engine_tp,
        samples=2048,
        response=response,
        context=4096,
        updates=4,
        recompute=False,
        seconds=seconds,
        domain=domain,
    )


def _qwen_235b(
    gpus: int,
    engines: int,
    *,
    response: int,
    seconds: float,
    tp: int,
    cp: int,
    engine_tp: int,
    pp: int = 8,
    release: str = "0.6",
    gpu: GpuName = GpuName.h100,
    domain: int = 8,
) -> Published:
    return Published(
        release=release,
        model="Qwen3-235B-A22B",
        gpu=gpu,
        trainer_gpus=gpus,
        engine_gpus=engines,
        ahead=int(engines > 0),
        tp=tp,
        cp=cp,
        pp=pp,
        ep=16,
        engine_tp=engine_tp,
        samples=512,
        response=response,
        context=8192,
        updates=1,
        recompute=True,
        seconds=seconds,
        domain=domain,
    )


FITTED: Sequence[Published] = (  # the newest release that has the row
    _llama(16, 0, response=1060, seconds=97.7),
    _llama(8, 8, response=1129, seconds=74.6),
    _qwen_32b(32, 0, response=3206, seconds=393),
    _qwen_32b(32, 32, response=3207, seconds=215),
    _qwen_30b(32, 0, response=3203, seconds=192),
    _qwen_30b(16, 16, pp=2, response=3201, seconds=152),
    _qwen_30b(128, 64, ahead=8, response=3206, seconds=34.5),
    _qwen_235b(128, 0, tp=2, cp=2, engine_tp=16, response=5698, seconds=395),
    _qwen_235b(256, 0, tp=2, cp=2, engine_tp=16, response=5713, seconds=312),
    _qwen_235b(128, 128, tp=4, cp=1, engine_tp=8, response=5721, seconds=231),
)
NOT_FITTED: Sequence[Published] = (
    _qwen_30b(32, 0, tp=2, engine_tp=4, release="0.4", response=3154, seconds=225),
    _qwen_30b(16, 16, pp=2, release="0.4", response=3158, seconds=244),
    _qwen_235b(128, 0, tp=2, cp=2, engine_tp=16, release="0.4", response=5671, seconds=506),
    _qwen_235b(128, 128, tp=4, cp=1, engine_tp=8, release="0.4", response=5691, seconds=241),
    _qwen_30b(16, 0, ep=16, engine_tp=1, gpu=GpuName.gb200, domain=72, response=3199, seconds=221),
    _qwen_30b(8, 8, ep=8, engine_tp=1, gpu=GpuName.gb200, domain=72, response=3197, seconds=301),
    _qwen_235b(64, 0, tp=2, cp=2, pp=4, engine_tp=8, gpu=GpuName.gb200, domain=72, response=5709, seconds=286),
    _qwen_235b(128, 0, tp=2, cp=2, pp=4, engine_tp=8, gpu=GpuName.gb200, domain=72, response=5693, seconds=345),
    _qwen_235b(64, 64, tp=4, cp=1, pp=4, engine_tp=8, gpu=GpuName.gb200, domain=72, response=5705, seconds=278),
)
# Relax has no model for the other rows: DeepSeek V3 (latent attention; 256 to 512 H100, 128 to 256 GB200), and agent
# runs of Nemotron 3 Nano (Mamba layers).


@dataclass(frozen=True, kw_only=True)
class VerlRow:
    """Holds a row of verl's table: seconds of a step of 512 prompts x 16 samples of Qwen2.5-Math-7B on H20."""

    trainer_gpus: int
    engine_gpus: int
    step: float
    rollout: float
    old_logprobs: float | None
    update: float


VERL_ROWS: Sequence[VerlRow] = (
    VerlRow(trainer_gpus=32, engine_gpus=0, step=790.10, rollout=357.41, old_logprobs=107.71, update=313.81),
    VerlRow(trainer_gpus=64, engine_gpus=0, step=365.28, rollout=150.72, old_logprobs=70.26, update=133.41),
    VerlRow(trainer_gpus=128, engine_gpus=0, step=356.30, rollout=177.85, old_logprobs=53.92, update=113.81),
    VerlRow(trainer_gpus=16, engine_gpus=16, step=294.77, rollout=21.26, old_logprobs=None, update=269.80),
    VerlRow(trainer_gpus=32, engine_gpus=32, step=189.26, rollout=28.46, old_logprobs=None, update=156.98),
    VerlRow(trainer_gpus=64, engine_gpus=64, step=150.63, rollout=33.14, old_logprobs=None, update=113.16),
)
VERL_SAMPLES, VERL_UPDATES, VERL_LONGEST = 512 * 16, 16, 28_672


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Holds the estimated seconds of a row: the step, its rollout, its updates, and its passes without updates."""

    step: float
    rollout: float
    train: PassSeconds
    forwards: float


def estimate(row: Published, efficiency: Efficiency = EFFICIENCY) -> Estimate:
    """Returns the estimate for a row of NeMo RL's table."""
    model, gpu = shape_dimensions(row.model), GPU_MODELS[row.gpu]
    layout = _layout(row)
    tokens = row.samples * (PROMPT + row.response)
    rows = Rows(
        total=tokens,
        keys=(PROMPT + row.response) / 2,
        head=tokens,
        micro_batches=tokens / layout.dp / row.context,
        updates=row.updates,
    )
    train = pass_seconds(
        model,
        gpu,
        layout,
        rows,
        gpus_per_node=row.domain,
        trained=True,
        recompute=row.recompute,
        sharded_optimizer=True,
        efficiency=efficiency,
    )
    one_pass = pass_seconds(model, gpu, layout, rows, gpus_per_node=row.domain, trained=False, efficiency=efficiency)
    forwards = FORWARDS * one_pass.total
    engines = Engines(
        count=(row.engine_gpus or row.trainer_gpus) // row.engine_tp, tp=row.engine_tp, max_running=MAX_RUNNING
    )
    if row.engine_gpus:
        in_flight = row.samples * max(row.ahead, 1.5)  # one step ahead: between one and two batches
        rollout = steady_rollout_seconds(
            model,
            gpu,
            engines,
            samples=row.samples,
            running=in_flight / engines.count,
            prompt=PROMPT,
            mean=row.response,
            gpus_per_node=row.domain,
            efficiency=efficiency,
        )
        step = max(rollout, train.total + forwards)
    else:
        rollout = batch_rollout_seconds(
            model,
            gpu,
            engines,
            samples=row.samples,
            prompt=PROMPT,
            mean=row.response,
            longest=row.context - PROMPT,
            gpus_per_node=row.domain,
            efficiency=efficiency,
        )
        step = rollout + train.total + forwards
    return Estimate(step=step, rollout=rollout, train=train, forwards=forwards)


def _layout(row: Published) -> ParallelConfig:
    dp = row.trainer_gpus // (row.tp * row.cp * row.pp)
    return ParallelConfig(dp=dp, tp=row.tp, pp=row.pp, vpp=1, cp=row.cp, ep=row.ep, etp=1, sequence_parallel=row.tp > 1)


def verl_estimates(row: VerlRow) -> Iterator[tuple[str, float, float]]:
    """Yields the name, published seconds and estimated seconds of each comparable number of a row."""
    model, gpu = shape_dimensions("Qwen2.5-7B"), GPU_MODELS[GpuName.h20]
    layout = ForwardLayout(dp=row.trainer_gpus, tp=1, pp=1, ep=1)
    low, high = 1.0, float(VERL_LONGEST)
    while high - low > 1:  # the length that explains update_actor
        middle = (low + high) / 2
        train = pass_seconds(
            model,
            gpu,
            layout,
            _verl_rows(middle),
            gpus_per_node=8,
            trained=True,
            recompute=True,
            sharded_optimizer=True,
        )
        low, high = (middle, high) if train.total < row.update else (low, middle)
    engines = Engines(count=row.engine_gpus or row.trainer_gpus, tp=1, max_running=MAX_RUNNING)
    name = f"{row.trainer_gpus}+{row.engine_gpus}" if row.engine_gpus else str(row.trainer_gpus)
    name = f"Qwen2.5-Math-7B, {name} h20"
    if row.old_logprobs is None:
        rollout = steady_rollout_seconds(
            model,
            gpu,
            engines,
            samples=VERL_SAMPLES,
            running=VERL_SAMPLES / engines.count,
            prompt=PROMPT,
            mean=low,
            gpus_per_node=8,
        )
        yield f"{name}, fully async: step ({low:.0f} tokens)", row.step, max(rollout, row.update)
        return
    once = pass_seconds(model, gpu, layout, _verl_rows(low), gpus_per_node=8, trained=False).total
    rollout = batch_rollout_seconds(
        model, gpu, engines, samples=VERL_SAMPLES, prompt=PROMPT, mean=low, longest=VERL_LONGEST, gpus_per_node=8
    )
    yield f"{name}, colocated: step ({low:.0f} tokens)", row.step, rollout + once + row.update
    yield f"{name}, colocated: gen", row.rollout, rollout
    yield f"{name}, colocated: old_log_prob", row.old_logprobs, once


def _verl_rows(response: float) -> Rows:
    tokens = VERL_SAMPLES * (PROMPT + response)
    return Rows(total=tokens, keys=(PROMPT + response) / 2, head=tokens, micro_batches=1, updates=VERL_UPDATES)


GRID: Mapping[str, Sequence[float]] = {
    "dense": (0.30, 0.35, 0.40, 0.45, 0.50),
    "experts": (0.10, 0.15, 0.20, 0.25, 0.30),
    "memory": (0.30, 0.35, 0.40, 0.45, 0.50, 0.60),
    "link": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
}


def fit() -> Efficiency:
    """Returns the efficiency of the grid with the smallest sum of squared logarithms of the fitted rows' ratios."""
    best, smallest = EFFICIENCY, math.inf
    for values in itertools.product(*GRID.values()):
        tried = replace(EFFICIENCY, **dict(zip(GRID, values, strict=True)))
        loss = sum(math.log(estimate(row, tried).step / row.seconds) ** 2 for row in FITTED)
        if loss < smallest:
            best, smallest = tried, loss
    return best


def model_flops_share(row: Published, found: Estimate, model: ModelDimensions) -> float:
    """Returns the estimated share of the GPU's rate in the trainer's updates, without recomputed operations."""
    tokens = row.samples * (PROMPT + row.response)
    rows = Rows(total=tokens, keys=(PROMPT + row.response) / 2, head=tokens, micro_batches=1)
    flops = pass_flops(model, rows, trained=True)
    return flops / (found.train.total * row.trainer_gpus * GPU_MODELS[row.gpu].flops)


def table() -> list[list[object]]:
    """Returns a row for each published number: name, source, published and estimated seconds, error, parts."""
    rows: list[list[object]] = []
    for fitted, published in ((True, FITTED), (False, NOT_FITTED)):
        for row in published:
            found = estimate(row)
            share = model_flops_share(row, found, shape_dimensions(row.model))
            parts = f"rollout {found.rollout:.0f}, log-probs {found.forwards:.0f}, train {found.train.total:.0f}"
            rows.append(
                [
                    row.name,
                    f"NeMo RL {row.release}{', fitted' if fitted else ''}",
                    row.seconds,
                    round(found.step, 1),
                    f"{found.step / row.seconds - 1:+.0%}",
                    f"{parts} ({share:.0%} of peak)",
                ]
            )
    for verl in VERL_ROWS:
        for name, seconds, guess in verl_estimates(verl):
            rows.append([name, "verl", seconds, round(guess, 1), f"{guess / seconds - 1:+.0%}", ""])
    return rows


def _result(rows: list[list[object]]) -> dict[str, object]:
    errors = [abs(estimate(row).step / row.seconds - 1) for row in FITTED]
    held = [abs(estimate(row).step / row.seconds - 1) for row in NOT_FITTED]
    verl = [abs(guess / seconds - 1) for row in VERL_ROWS for _, seconds, guess in verl_estimates(row)]
    fitted = ", ".join(f"{field.name} {getattr(EFFICIENCY, field.name):g}" for field in fields(Efficiency))
    return {
        "title": "Estimated step times",
        "command": "python -m benchmarks.step_time",
        "summary": f"Against published step times: at most {max(errors):.0%} off in {len(errors)} fitted rows, "
        f"{statistics.median(held):.0%} in the median of {len(held)} other rows of the same system "
        f"(at most {max(held):.0%}), {statistics.median(verl):.0%} in the median of verl's.",
        "columns": ["Published row", "Source", "Seconds", "Estimated", "Error", "Parts of the estimate, s"],
        "rows": rows,
        "notes": [
            f"Sources: NeMo RL's [performance summary]({NEMO}) with the recipes of the same release, and verl's "
            f"[fully async trainer]({VERL}). No row is a run of Relax, which has run on one GPU only.",
            f"Efficiencies: {fitted}.",
            "The rows of NeMo RL 0.4 that release 0.6 repeats show how much software alone changes: 225 s became "
            "192 s, 244 s became 152 s, and 506 s became 395 s.",
            "verl publishes neither mean lengths nor the layout of its engines. The length in brackets "
            "explains its update_actor, so the errors of these rows include that of the length.",
            "Not estimated: DeepSeek V3 and Nemotron 3 Nano, which are no families of Relax.",
        ],
    }


def main() -> None:
    """Prints the table, or fits the efficiencies."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fit", action="store_true", help="fit the efficiencies again")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    given = parser.parse_args()
    if given.fit:
        print(fit())
        return
    rows = table()
    for name, source, seconds, guess, error, parts in rows:
        print(f"{name:58} {source:20} {seconds:8} {guess:8} {error:>6}  {parts}")
    result = _result(rows)
    print(result["summary"])
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
