"""Measures data.mix with rewards that take ten times as long for videos as for text: ``python -m benchmarks.data_mix``.

It trains tiny_qwen3_vl twice on data=see (pictures, videos, text), async with staleness 1 and over-sampling 1.5: once
without and once with data.mix. Each modality is a third of the rows. This file is also the reward of both runs. Like a
slow judge, the reward takes ``--text-s`` seconds per answer, and ten times as long per answer about a video. For each
modality the output has its share of all ended samples, its share of all trained samples, and the difference of the two
shares in percentage points.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec

SLOWER = 10
MIX = "{image: 0.35, text: 0.4, video: 0.25}"


@dataclass(frozen=True)
class SlowVideosConfig(RewardConfig):
    """Holds the settings of the reward. ``text_s`` is the time per answer in seconds, except for videos."""

    name: str = "slow_videos"
    text_s: float = 0.5
    timeout_s: float = 600.0


async def score(given: RewardInput, config: SlowVideosConfig) -> RewardOutput:
    """Returns 1 for the right answer, after the wait."""
    shows_video = any(item.kind == "video" for item in given.media)
    await asyncio.sleep(config.text_s * (SLOWER if shows_video else 1))
    exact = given.stopped and given.response.strip() == given.answer.strip()
    return RewardOutput(reward=float(exact), exact=exact)


SPEC = RewardSpec(name="slow_videos", summary="exact match, slow for videos", config=SlowVideosConfig, score=score)


def modalities(folder: Path, arguments: argparse.Namespace, *options: str) -> dict[str, Any]:
    """Executes a run in ``folder`` and returns its metrics by modality."""
    command = [
        *(sys.executable, "-m", "relax_core", f"run.dir={folder}", "model=tiny_qwen3_vl", "data=see"),
        *(f"reward.name={Path(__file__).resolve()}", f"reward.text_s={arguments.text_s}"),
        *("mode=async", "mode.max_staleness=1", "rollout.over_sampling=1.5"),
        *("rollout.prompts_per_step=12", "algo.group_size=4", f"run.steps={arguments.steps}", "eval.every=0"),
        *("run.save_every=0", "run.export_hf=false", "engine.start_timeout_s=600", "run.start_timeout_s=600", *options),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.limit_s)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["ledger"]["lost"] == 0 and summary["ledger"]["trained_twice"] == 0
    for finding in summary["findings"]:
        print(f"  {finding}")
    return dict(summary["modalities"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="train steps of a run")
    parser.add_argument("--text-s", type=float, default=0.5, help="seconds of a reward; ten times as long for videos")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="timeout of a run in seconds")
    arguments = parser.parse_args()
    for title, options in (("data.mix=null", ()), (f"data.mix={MIX}", (f"data.mix={MIX}",))):
        print(title, flush=True)
        with tempfile.TemporaryDirectory(prefix="relax-mix-") as temporary:
            for name, counts in modalities(Path(temporary) / "run", arguments, *options).items():
                issued, trained = counts["issued_share"], counts["trained_share"]
                print(
                    f"  {name:8}{counts['issued']:7} issued {issued:7.1%}{counts['trained']:7} trained {trained:7.1%}"
                    f"{100 * (trained - issued):+7.1f} points",
                    flush=True,
                )


if __name__ == "__main__":
    main()
