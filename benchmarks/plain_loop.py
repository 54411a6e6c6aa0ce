"""The baseline of `benchmarks.throughput`: GRPO in one process with transformers alone, on the same task and model.

    python -m benchmarks.plain_loop [--steps 40 --seed 0] [--model FOLDER --new-tokens 256 --learning-rate 0]

It does the work of a public single-process trainer: ``generate`` with its KV cache for all samples of the step at once,
rewards, one padded forward pass for the log-probs of the responses, backward, clipping, AdamW. It has one thread and no
other process. It uses only the task, the reward and the GRPO loss of Relax. Prints one line of JSON with one entry per
step.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

PROMPTS, GROUP_SIZE, NEW_TOKENS = 8, 16, 8
LEARNING_RATE, WARMUP_STEPS, CLIP, CLIP_GRAD = 8e-4, 10, 0.2, 1.0
TASK = "reverse_digits"


def main() -> None:
    arguments = loop_arguments(__doc__).parse_args()
    loop = PlainLoop(arguments)
    print(json.dumps([loop.step(step) for step in range(arguments.steps)]))


def loop_arguments(described: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a single-process loop. The defaults are the demo's model and the demo's task."""
    parser = argparse.ArgumentParser(description=described, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=None, help="folder of a model with the built-in tokenizer")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="maximum tokens of an answer")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    return parser


class PlainLoop:
    """Holds model, tokenizer and optimizer of the loop. ``given`` are the loop's flags (`loop_arguments`)."""

    def __init__(self, given: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from relax_core.tools.make_tiny import tiny_model_folder

        torch.set_num_threads(1)
        torch.manual_seed(given.seed)
        folder = given.model or tiny_model_folder("tiny_qwen3", task=TASK)
        self._given = given
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=given.learning_rate, betas=(0.9, 0.999), weight_decay=0.0
        )

    def step(self, step: int) -> dict[str, float]:
        """Runs one train step. Returns the milliseconds of its parts, its samples and tokens, and the mean reward."""
        began = time.perf_counter()
        inputs, answers = self._prompts(step)
        sequences = self._generate(inputs)
        generated = time.perf_counter()
        width = inputs["input_ids"].shape[1]
        rewards, mask = self._score(sequences[:, width:], answers)
        scored = time.perf_counter()
        self._train(sequences, inputs["attention_mask"], rewards, mask, step=step)
        ended = time.perf_counter()
        return {
            "step_ms": 1e3 * (ended - began),
            "generate_ms": 1e3 * (generated - began),
            "reward_ms": 1e3 * (scored - generated),
            "train_ms": 1e3 * (ended - scored),
            "samples": float(len(sequences)),
            "tokens": float(mask.sum()),
            "reward": float(rewards.mean()),
        }

    def _prompts(self, step: int) -> tuple[dict[str, Tensor], list[str]]:
        from relax_core.data.generated import example

        examples = [
            example(TASK, split="train", seed=self._given.seed, index=step * PROMPTS + place)
            for place in range(PROMPTS)
        ]
        inputs = self._tokenizer.apply_chat_template(
            [[{"role": "user", "content": task_example.prompt}] for task_example in examples],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        return dict(inputs), [task_example.answer for task_example in examples]

    def _generate(self, inputs: dict[str, Tensor]) -> Tensor:
        """Returns prompts with responses, ``[samples, width + new]``. The samples of a prompt are adjacent."""
        import torch

        with torch.inference_mode():
            sequences: Tensor = self._model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=self._given.new_tokens,
                num_return_sequences=GROUP_SIZE,
            )
        return sequences.clone()  # autograd needs a tensor from outside inference mode

    def _score(self, responses: Tensor, answers: list[str]) -> tuple[Tensor, Tensor]:
        """Returns rewards ``[samples]``, and the mask of response tokens up to the end token, ``[samples, new]``."""
        import torch

        from relax_core.contracts.reward import RewardInput
        from rewards.reverse_digits import ReverseDigitsConfig, score

        stop = responses == self._tokenizer.eos_token_id
        before = stop.cumsum(dim=1) - stop.to(torch.int64)
        texts = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        config = ReverseDigitsConfig()
        rewards = [
            score(RewardInput(response=text, stopped=stopped, answer=answers[i // GROUP_SIZE], row={}), config).reward
            for i, (text, stopped) in enumerate(zip(texts, stop.any(dim=1).tolist(), strict=True))
        ]
        return torch.tensor(rewards), before == 0

    def _train(self, sequences: Tensor, prompt_mask: Tensor, rewards: Tensor, mask: Tensor, *, step: int) -> None:
        """Trains one step of on-policy GRPO. The old log-probs are the new log-probs without gradient."""
        import torch

        from algorithms.functional import clipped_policy_loss, group_relative_advantages

        advantages = torch.cat(
            [
                group_relative_advantages(rewards=group, normalize_std=True, std_epsilon=1e-6)
                for group in rewards.split(GROUP_SIZE)
            ]
        )
        new = mask.shape[1]
        attention = torch.cat([prompt_mask.repeat_interleave(GROUP_SIZE, dim=0), mask.to(prompt_mask.dtype)], dim=1)
        logits = self._model(input_ids=sequences, attention_mask=attention, logits_to_keep=new + 1).logits[:, :-1]
        logprobs = torch.log_softmax(logits, dim=-1).gather(2, sequences[:, -new:, None])[..., 0]
        loss = clipped_policy_loss(
            logprobs=logprobs[mask],
            old_logprobs=logprobs.detach()[mask],
            advantages=advantages[:, None].expand_as(mask)[mask],
            loss_mask=mask[mask],
            clip_low=CLIP,
            clip_high=CLIP,
        )
        self._optimizer.param_groups[0]["lr"] = self._given.learning_rate * min(1.0, (step + 1) / WARMUP_STEPS)
        self._optimizer.zero_grad()
        loss.per_token.mean().backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_GRAD)
        self._optimizer.step()


if __name__ == "__main__":
    main()
