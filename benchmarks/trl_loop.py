"""A public single-process trainer on the same task, model and batch: TRL's GRPOTrainer with transformers' generate.

    pip install --no-deps --target FOLDER trl accelerate datasets dill multiprocess pandas pyarrow python-dateutil six
    python -m benchmarks.throughput --trl-path FOLDER

TRL is no part of Relax: FOLDER is searched after the libraries that are installed. One thread. Prints one line of JSON:
one entry a step.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

from benchmarks.plain_loop import CLIP_GRAD, GROUP_SIZE, LEARNING_RATE, NEW_TOKENS, PROMPTS, TASK, WARMUP_STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trl-path", required=True, help="folder with TRL and what it needs beside our own libraries")
    arguments = parser.parse_args()
    sys.path.append(arguments.trl_path)
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(steps=arguments.steps + 1, seed=arguments.seed, folder=folder, callbacks=[Clock()])
        printed, sys.stdout = sys.stdout, sys.stderr  # its log lines
        trainer.train()
        sys.stdout = printed
    samples = float(PROMPTS * GROUP_SIZE)
    steps = [{"step_ms": 1e3 * (end - start), "samples": samples} for start, end in pairwise(ends)]
    print(json.dumps(steps))


def _trainer(*, steps: int, seed: int, folder: str, callbacks: list[Any]) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from relax_core.data.generated import example
    from relax_core.tools.make_tiny import tiny_model_folder

    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    model_folder = tiny_model_folder("tiny_qwen3", task=TASK)
    examples = [example(TASK, split="train", seed=seed, index=index) for index in range(steps * PROMPTS)]
    rows = [{"prompt": [{"role": "user", "content": one.prompt}], "answer": one.answer} for one in examples]
    return trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32"),
        reward_funcs=_rewards,
        args=trl.GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=PROMPTS * GROUP_SIZE,
            num_generations=GROUP_SIZE,
            max_completion_length=NEW_TOKENS,
            max_steps=steps,
            learning_rate=LEARNING_RATE,
            warmup_steps=WARMUP_STEPS,
            max_grad_norm=CLIP_GRAD,
            temperature=1.0,
            beta=0.0,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=seed,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model_folder, padding_side="left"),
        callbacks=callbacks,
    )


def _rewards(completions: list[list[dict[str, str]]], answer: list[str], **others: Any) -> list[float]:
    from relax_core.contracts.reward import RewardInput
    from rewards.reverse_digits import ReverseDigitsConfig, score

    config = ReverseDigitsConfig()
    given = [
        RewardInput(response=completion[0]["content"], stopped=len(ids) < NEW_TOKENS, answer=wanted, row={})
        for completion, ids, wanted in zip(completions, others["completion_ids"], answer, strict=True)
    ]
    return [float(score(one, config).reward or 0.0) for one in given]


if __name__ == "__main__":
    main()
