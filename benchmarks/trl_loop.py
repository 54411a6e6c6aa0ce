"""A public single-process trainer for comparison: TRL's GRPOTrainer on the same task, model and batch.

    pip install --no-deps --target FOLDER trl accelerate datasets dill multiprocess pandas pyarrow python-dateutil six
    python -m benchmarks.throughput --trl-path FOLDER

TRL is not part of Relax. Python searches FOLDER after the installed libraries. Prints one line of JSON with one entry
per step. With ``--rows`` the loop trains on the prompts and answers of a file, with the reward
benchmarks/last_number_reward.py.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, cycle, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.plain_loop import CLIP_GRAD, GROUP_SIZE, PROMPTS, TASK, WARMUP_STEPS, loop_arguments

if TYPE_CHECKING:
    from relax_core.contracts.reward import RewardOutput


def main() -> None:
    parser = loop_arguments(__doc__)
    parser.add_argument("--trl-path", required=True, help="folder with TRL and its further dependencies")
    parser.add_argument("--rows", type=Path, help="a .jsonl file of prompts and answers instead of the demo's data")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and optimizer")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    sys.path.append(arguments.trl_path)
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(arguments.threads)
    ends: list[float] = []
    tokens: list[float] = []  # number of answer tokens of each step

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(arguments, folder=folder, tokens=tokens, callbacks=[Clock()])
        printed, sys.stdout = sys.stdout, sys.stderr  # TRL's log lines go to stderr
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

    from relax_core.tools.make_tiny import tiny_model_folder

    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    model_folder = given.model or tiny_model_folder("tiny_qwen3", task=TASK)
    steps = given.steps + 1
    rows = [
        {"prompt": [{"role": "user", "content": prompt}], "answer": answer}
        for prompt, answer in islice(_examples(given), steps * PROMPTS)
    ]
    return trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=given.dtype),
        reward_funcs=_reward_function(given, tokens),
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


def _examples(given: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yields prompts and answers in an endless cycle."""
    from relax_core.data.generated import example

    if given.rows is not None:
        for line in cycle(given.rows.read_text(encoding="utf-8").splitlines()):
            row = json.loads(line)
            yield row["prompt"], row["answer"]
    for index in count():
        drawn_example = example(TASK, split="train", seed=given.seed, index=index)
        yield drawn_example.prompt, drawn_example.answer


def _reward_function(given: argparse.Namespace, tokens: list[float]) -> Callable[..., list[float]]:
    """Returns the reward function that TRL calls once per step. It appends the step's answer tokens to ``tokens``."""
    from benchmarks import last_number_reward
    from relax_core.contracts.reward import RewardInput
    from rewards import reverse_digits

    score: Callable[[RewardInput], RewardOutput]
    if given.rows is not None:
        score = partial(last_number_reward.score, config=last_number_reward.LastNumberConfig(near=True))
    else:
        score = partial(reverse_digits.score, config=reverse_digits.ReverseDigitsConfig())

    def rewards(completions: list[list[dict[str, str]]], answer: list[str], **others: Any) -> list[float]:
        tokens.append(float(sum(map(len, others["completion_ids"]))))
        inputs = [
            RewardInput(response=completion[0]["content"], stopped=len(ids) < given.new_tokens, answer=wanted, row={})
            for completion, ids, wanted in zip(completions, others["completion_ids"], answer, strict=True)
        ]
        return [float(score(reward_input).reward or 0.0) for reward_input in inputs]

    return rewards


if __name__ == "__main__":
    main()
