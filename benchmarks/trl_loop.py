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
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from benchmarks.plain_loop import CLIP_GRAD, GROUP_SIZE, PROMPTS, TASK, WARMUP_STEPS, loop_arguments


def main() -> None:
    parser = loop_arguments(__doc__)
    parser.add_argument("--trl-path", required=True, help="folder with TRL and what it needs beside our own libraries")
    arguments = parser.parse_args()
    sys.path.append(arguments.trl_path)
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    ends: list[float] = []
    tokens: list[float] = []  # of the answers, by step

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(arguments, folder=folder, tokens=tokens, callbacks=[Clock()])
        printed, sys.stdout = sys.stdout, sys.stderr  # its log lines
        trainer.train()
        sys.stdout = printed
    samples = float(PROMPTS * GROUP_SIZE)
    steps = [
        {"step_ms": 1e3 * (end - start), "samples": samples, "tokens": of_step}
        for (start, end), of_step in zip(pairwise(ends), tokens[1:], strict=True)
    ]
    print(json.dumps(steps))


def _trainer(given: argparse.Namespace, *, folder: str, tokens: list[float], callbacks: list[Any]) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from relax_core.data.generated import example
    from relax_core.tools.make_tiny import tiny_model_folder

    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    model_folder = given.model or tiny_model_folder("tiny_qwen3", task=TASK)
    steps = given.steps + 1
    examples = [example(TASK, split="train", seed=given.seed, index=index) for index in range(steps * PROMPTS)]
    rows = [{"prompt": [{"role": "user", "content": one.prompt}], "answer": one.answer} for one in examples]
    return trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32"),
        reward_funcs=_reward_function(given.new_tokens, tokens),
        args=trl.GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=PROMPTS * GROUP_SIZE,
            num_generations=GROUP_SIZE,
            max_completion_length=given.new_tokens,
            max_steps=steps,
            learning_rate=given.learning_rate,
            warmup_steps=WARMUP_STEPS,
            max_grad_norm=CLIP_GRAD,
            temperature=1.0,
            beta=0.0,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=given.seed,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model_folder, padding_side="left"),
        callbacks=callbacks,
    )


def _reward_function(new_tokens: int, tokens: list[float]) -> Callable[..., list[float]]:
    """Returns the demo's reward as TRL calls it, once a step; it appends the number of the step's answer tokens."""
    from relax_core.contracts.reward import RewardInput
    from rewards.reverse_digits import ReverseDigitsConfig, score

    config = ReverseDigitsConfig()

    def rewards(completions: list[list[dict[str, str]]], answer: list[str], **others: Any) -> list[float]:
        tokens.append(float(sum(map(len, others["completion_ids"]))))
        given = [
            RewardInput(response=completion[0]["content"], stopped=len(ids) < new_tokens, answer=wanted, row={})
            for completion, ids, wanted in zip(completions, others["completion_ids"], answer, strict=True)
        ]
        return [float(score(one, config).reward or 0.0) for one in given]

    return rewards


if __name__ == "__main__":
    main()
