"""Makes the tiny judges and policies of ``benchmarks.learning --suite agents``, and held-out pairs to test the judges.

There are two tasks: the answer to "rev 12345" is 54321, and to "inc 12345" 23456 (each digit plus one, 9 becomes 0). A
judge knows one task. It reads the question and a response (taught_judge.jinja) and compares its own answer with the
response, digit by digit. It writes each pair of digits, followed by = or /, and its verdict at the end:
"55=44=32/22=11= 0". It is trained on right responses and on six kinds of wrong responses. The first policy answers both
tasks, sometimes correctly. The second policy guesses a number from 1 to 7 from a history that is rewritten in each
turn; half of its guesses use the history.

    python -m benchmarks.taught_models --judge rev --into FOLDER

A model is made on first use in a separate process and cached in the user's cache folder, like the built-in models.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.openai_agent import HIGHEST, OPENING, TURNS, history
from relax_core.contracts.private_folder import file_locked
from relax_core.families.tiny_configs import STUDENT, tiny_config
from relax_core.tools.make_tiny import default_cache_root
from relax_core.tools.tiny_text import WarmStart, build_tokenizer, guess, padded, supervised_steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DIGITS = "0123456789"
LENGTH = 5
TASKS: Mapping[str, Callable[[str], str]] = {
    "rev": lambda digits: digits[::-1],
    "inc": lambda digits: "".join(DIGITS[(int(digit) + 1) % 10] for digit in digits),
}
PROMPT = Path(__file__).with_name("taught_judge.jinja")
PARSE = r" (?P<verdict>[01])$"
MAX_TOKENS = 32  # tokens of a judge's text on 8 characters: 3 per character, the verdict and the end


@dataclass(frozen=True)
class Cooling(WarmStart):
    """Defines a warm start with a learning rate that falls linearly to a tenth."""

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of a step. Steps begin at 0."""
        return super().lr_at(step) * (1.0 - 0.9 * step / self.steps)


JUDGE = Cooling(steps=800, seed=0, lr=3e-3, warmup_steps=50)
# "both": greedy answers solve about 0.4 of the first task and 0.3 of the second, which is learnt faster. "guess": the
# policy plays like the scripted player, with mistakes. With fewer steps no guess would use the history.
POLICIES = {
    "both": WarmStart(steps=105, seed=8),
    "guess": Cooling(steps=1000, seed=0, lr=3e-3, warmup_steps=50),
}
REV_SHARE = 0.7
HELD_OUT_PAIRS, HELD_OUT_SLOTS = 512, 16
RECIPE_VERSION = 1  # increase when a change of this file changes the models
_MAKE_DEADLINE_S = 3600.0


def question_of(rng: random.Random, task: str, *, held_out: bool = False) -> tuple[str, str]:
    """Returns a question of a task and its answer. A checksum selects one of sixteen questions as held out."""
    while True:
        digits = "".join(rng.choices(DIGITS, k=LENGTH))
        if (zlib.crc32(digits.encode()) % HELD_OUT_SLOTS == 0) is held_out:
            return f"{task} {digits}", TASKS[task](digits)


def wrong_response(rng: random.Random, answer: str) -> str:
    """Returns a wrong response: one or two digits changed, moved, missing or added, or all digits random."""
    digits, kind = list(answer), rng.choice(("one", "one", "one", "two", "moved", "short", "long", "drawn"))
    if kind in ("one", "two"):
        for place in rng.sample(range(LENGTH), 1 if kind == "one" else 2):
            digits[place] = DIGITS[(int(digits[place]) + rng.randrange(1, 10)) % 10]
    elif kind == "moved":
        first, second = rng.sample(range(LENGTH), 2)
        digits[first], digits[second] = digits[second], digits[first]
    elif kind == "short":
        digits = digits[: rng.randrange(LENGTH)]
    elif kind == "long":
        digits += rng.choices(DIGITS, k=rng.randrange(1, 4))
    else:
        digits = rng.choices(DIGITS, k=LENGTH)
    return "".join(digits)


def pair_of(rng: random.Random, task: str, *, held_out: bool = False) -> tuple[str, str, str]:
    """Returns a question, its answer and a response. Half of the responses are right."""
    question, answer = question_of(rng, task, held_out=held_out)
    return question, answer, answer if rng.random() < 0.5 else wrong_response(rng, answer)


def judgement(answer: str, response: str) -> str:
    """Returns the text that a perfect judge writes."""
    width = max(len(answer), len(response))
    pairs = zip(answer.ljust(width, "-"), response.ljust(width, "-"), strict=True)
    return "".join(f"{own}{its}{'=' if own == its else '/'}" for own, its in pairs) + f" {int(answer == response)}"


def write_known_verdicts(file: Path, tasks: Mapping[str, str]) -> None:
    """Writes held-out pairs in the format of `reward.check.path`. ``tasks`` names the judge of each task."""
    rng = random.Random("held-out pairs")
    rows = []
    for number in range(HELD_OUT_PAIRS):
        task = list(tasks)[number % len(tasks)]
        question, answer, response = pair_of(rng, task, held_out=True)
        verdict = int(response == answer)
        rows.append({"question": question, "answer": response, "verdict": verdict, "judge": tasks[task]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_rows(file: Path, judges: Mapping[str, str], *, rows: int, seed: int, held_out: bool) -> None:
    """Writes rows that alternate between the tasks in ``judges``. Each row names the judge of its task."""
    rng = random.Random(f"rows {seed}")
    made = []
    for number in range(rows):
        task = list(judges)[number % len(judges)]
        question, answer = question_of(rng, task, held_out=held_out)
        made.append({"prompt": question, "answer": answer, "judge": judges[task]})
    file.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")


def judge_folder(task: str) -> Path:
    """Returns the folder of the judge that knows a task."""
    return _made("judge", task)


def judge_arguments(name: str, folder: Path) -> list[str]:
    """Returns the overrides that give a run a trained judge with this name."""
    key = f"reward.judges.{name}"
    return [
        f"{key}.model={folder}",
        f"{key}.prompt={PROMPT}",
        f"{key}.parse='{PARSE}'",
        f"{key}.max_new_tokens={MAX_TOKENS}",
    ]


def policy_folder(task: str) -> Path:
    """Returns the folder of a policy: "both" is sometimes right in both tasks, "guess" plays the guessing game."""
    return _made("policy", task)


def _made(kind: str, task: str) -> Path:
    """Returns the folder of a model. Makes the model if the folder does not exist."""
    recipe = JUDGE if kind == "judge" else POLICIES[task]
    text = f"{RECIPE_VERSION}/{asdict(recipe)}/{PROMPT.read_text(encoding='utf-8')}"
    key = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    root = default_cache_root()
    folder = root / f"taught-{kind}-{task}-{key}"
    root.mkdir(parents=True, exist_ok=True)
    with file_locked(root / f".{folder.name}.lock", deadline_s=_MAKE_DEADLINE_S, makes=f"the taught {kind}"):
        if not folder.is_dir():
            partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=root))
            try:
                command = [sys.executable, "-m", "benchmarks.taught_models", f"--{kind}={task}", f"--into={partial}"]
                one_thread = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
                subprocess.run(command, env=os.environ | one_thread, timeout=_MAKE_DEADLINE_S, check=True)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


def write_model(folder: Path, recipe: WarmStart, example: Callable[[random.Random], tuple[str, str]]) -> None:
    """Trains a tiny Qwen3 on examples (prompt, answer) and writes it with its tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    tokenizer = build_tokenizer()
    own = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "dtype": "float32"}
    model = Qwen3ForCausalLM(Qwen3Config(**tiny_config(STUDENT), **own))
    rng = random.Random(f"taught {recipe.seed}")

    def loss_of_step(step: int) -> Any:
        ids, targets = _batch(tokenizer, [example(rng) for _ in range(recipe.batch_size)])
        hidden = model.model(input_ids=ids).last_hidden_state
        rows = targets >= 0
        return torch.nn.functional.cross_entropy(model.lm_head(hidden[rows]), targets[rows])

    supervised_steps(model, recipe, loss_of_step)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _batch(tokenizer: PreTrainedTokenizerFast, examples: list[tuple[str, str]]) -> tuple[Any, Any]:
    prompts: Any = tokenizer.apply_chat_template(
        [[{"role": "user", "content": prompt}] for prompt, _ in examples], add_generation_prompt=True, return_dict=False
    )
    answers = [[*tokenizer.encode(answer), tokenizer.eos_token_id] for _, answer in examples]
    return padded(prompts, answers, pad=tokenizer.pad_token_id)


def _judged_example(rng: random.Random, task: str) -> tuple[str, str]:
    question, answer, response = pair_of(rng, task)
    return f"{question} {response}", judgement(answer, response)


def _mixed_question(rng: random.Random) -> tuple[str, str]:
    return question_of(rng, "rev" if rng.random() < REV_SHARE else "inc")


def guess_example(rng: random.Random) -> tuple[str, str]:
    """Returns a turn of the guessing game in benchmarks/openai_agent.py, and the scripted player's guess."""
    number, so_far = rng.randint(1, HIGHEST), list[tuple[int, str]]()
    texts = [OPENING]
    for _ in range(rng.randrange(TURNS)):
        said = int(guess(rng, texts))
        if said == number:
            break
        so_far.append((said, "higher" if said < number else "lower"))
        texts += [str(said), so_far[-1][1]]
    return history(so_far), guess(rng, texts)


def main() -> None:
    """Makes one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--judge", choices=list(TASKS), help="the task that a judge knows")
    which.add_argument("--policy", choices=list(POLICIES), help="the tasks of a policy")
    parser.add_argument("--into", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.judge is not None:
        write_model(arguments.into, JUDGE, lambda rng: _judged_example(rng, arguments.judge))
    else:
        example = guess_example if arguments.policy == "guess" else _mixed_question
        write_model(arguments.into, POLICIES[arguments.policy], example)


if __name__ == "__main__":
    main()
