"""What the prompts of a run need, found before it starts: a template that takes them, tokens that the model has, and a
context that holds them. `engine.context_length` follows from it where it is not set."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from relax_core.config.model_folder import folder_problems, read_model_config
from relax_core.config.schema import LauncherKind, RelaxConfig
from relax_core.data.files import RowFile, open_rows
from relax_core.data.generated import LONGEST_PROMPT, example, task_names
from relax_core.data.prompt_lengths import PromptLengths, ToMessages, prompt_lengths, prompt_text
from relax_core.data.sources import file_rows
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.plan.models import shape_dimensions
from relax_core.registry import find_env
from relax_core.tools.make_tiny import MAX_POSITIONS, MODEL_NAMES, tiny_prompt_tokenizer

ROUND_TO = 64  # tokens of a derived context: the embedded engine's cache begins with as many
UNKNOWN_PROMPT = 512  # tokens, where there is no data or no tokenizer yet: such a run plans, and cannot start
SHOWN = 5  # rows that are named


def settle_context(config: RelaxConfig) -> tuple[RelaxConfig, list[str]]:
    """The configuration with the context that its prompts need, where ``engine.context_length`` is null; and what is
    wrong with the model's tokenizer and with the prompts. What other checks tell of is left to them. A job on another
    cluster is looked at there, where its files are."""
    if config.launcher.name is LauncherKind.ray_job or config.rollout.max_new_tokens < 1:
        return config, []
    try:
        tokenizer = _tokenizer(config)
    except ValueError as error:
        return _with_context(config, UNKNOWN_PROMPT), [f"model.path: {error}"]
    if tokenizer is None:
        return _with_context(config, UNKNOWN_PROMPT), []
    longest, problems = _look(config, tokenizer)
    return _with_context(config, longest), [*_vocabulary_problems(config, tokenizer), *problems]


def _look(config: RelaxConfig, tokenizer: PromptTokenizer) -> tuple[int, list[str]]:
    """Tokens that the longest prompt has, or may have; and what is wrong with the prompts."""
    if config.data.task is not None:
        try:
            return _longest_generated(config, tokenizer), []
        except ValueError as error:
            return UNKNOWN_PROMPT, [f"data={config.data.name} with env={config.env.name}: {error}"]
    positions = _positions(config)
    context = config.engine.context_length if config.engine.context_length is not None else positions
    room = None if context is None else context - config.rollout.max_new_tokens
    lengths = _lengths_in_files(config, tokenizer, room=room)
    if lengths is None:
        return UNKNOWN_PROMPT, []
    return lengths.bound or UNKNOWN_PROMPT, list(_row_problems(config, lengths, room=room, positions=positions))


def _tokenizer(config: RelaxConfig) -> PromptTokenizer | None:
    """None where there is no model yet, or none that could be read for another reason. Raises ValueError."""
    model = config.model
    if model.path is not None and model.builtin is None:
        folder = Path(model.path)
        return None if any(folder_problems(config, folder, key="model.path")) else PromptTokenizer(folder)
    return tiny_prompt_tokenizer() if model.path is None and model.builtin in MODEL_NAMES else None


def _vocabulary_problems(config: RelaxConfig, tokenizer: PromptTokenizer) -> Iterator[str]:
    if config.model.path is None:
        return
    values = read_model_config(Path(config.model.path))
    rows = values.get("vocab_size", values.get("text_config", {}).get("vocab_size"))
    if isinstance(rows, int) and tokenizer.vocabulary_size > rows:
        yield (
            f"model.path={config.model.path}: its tokenizer has token ids up to {tokenizer.vocabulary_size - 1}, its "
            f"weights only {rows} rows (vocab_size in config.json). Give the tokenizer that belongs to these weights."
        )


def _positions(config: RelaxConfig) -> int | None:
    """The most tokens that the model takes; None where that is not known, or where another check tells why not."""
    model = config.model
    if model.builtin is not None:
        return MAX_POSITIONS
    try:
        if model.path is not None:
            longest = read_model_config(Path(model.path)).get("max_position_embeddings")
            return longest if isinstance(longest, int) else None
        return shape_dimensions(model.shape).positions if model.shape is not None else None
    except (ValueError, OSError):
        return None


def _longest_generated(config: RelaxConfig, tokenizer: PromptTokenizer) -> int:
    """Of the whole task: one row's tokens, and one for each character that another may have more. Raises ValueError for
    a row that gives no prompt."""
    task = config.data.task
    if task not in task_names():
        return UNKNOWN_PROMPT
    prompt = example(task, split="train", seed=config.seed, index=0).prompt
    text = prompt_text({"prompt": prompt, "answer": ""}, tokenizer, _messages(config))
    return len(tokenizer.encode_text(text)) + LONGEST_PROMPT[task] - len(prompt)


def _lengths_in_files(config: RelaxConfig, tokenizer: PromptTokenizer, *, room: int | None) -> PromptLengths | None:
    """None where a file cannot be read, which another check tells."""
    try:
        parts = _parts(config)
    except ValueError:
        return None
    return prompt_lengths(parts, tokenizer=tokenizer, messages=_messages(config), room=room)


def _messages(config: RelaxConfig) -> ToMessages:
    env = find_env(config.env.name)
    return lambda row: env.messages(row, config.env)


def _parts(config: RelaxConfig) -> list[tuple[RowFile, range]]:
    """The rows that are trained on, and those that are evaluated. Raises ValueError."""
    if config.data.path is None:
        raise ValueError("data.path is not set")
    rows, train = file_rows(config.data)
    if not config.eval.every:
        return [(rows, range(train))]
    if config.data.eval_path is None:
        return [(rows, range(train)), (rows, range(max(train, 0), min(max(train, 0) + config.eval.rows, len(rows))))]
    keys = {"prompt_key": config.data.prompt_key, "answer_key": config.data.answer_key}
    held_out = open_rows(Path(config.data.eval_path), **keys)
    return [(rows, range(train)), (held_out, range(min(config.eval.rows, len(held_out))))]


def _row_problems(
    config: RelaxConfig, lengths: PromptLengths, *, room: int | None, positions: int | None
) -> Iterator[str]:
    if lengths.refused:
        where, why = lengths.refused[0]
        count = f"{len(lengths.refused)} of {lengths.rows} rows give no prompt; the first: " if lengths.rows > 1 else ""
        yield f"{count}{where}: {why}"
    if lengths.too_long:
        assert room is not None
        named = ", ".join(f"{place.where} has {place.tokens}" for place in lengths.too_long[:SHOWN])
        yield (
            f"{len(lengths.too_long)} of {lengths.rows} prompts are longer than the {max(room, 0)} tokens that are "
            f"left beside rollout.max_new_tokens={config.rollout.max_new_tokens}: {named}. "
            f"{_remedy(config, lengths, positions)}"
        )


def _remedy(config: RelaxConfig, lengths: PromptLengths, positions: int | None) -> str:
    most = max(place.tokens for place in lengths.too_long) + config.rollout.max_new_tokens
    if config.engine.context_length is not None and (positions is None or most <= positions):
        return f"Use engine.context_length={most}, or null, which derives it; or leave the rows out."
    limit = "" if positions is None else f" The model has {positions} positions."
    return f"Lower rollout.max_new_tokens, or leave the rows out.{limit}"


def _with_context(config: RelaxConfig, prompt_tokens: int) -> RelaxConfig:
    if config.engine.context_length is not None:
        return config
    wanted = -(-(prompt_tokens + config.rollout.max_new_tokens) // ROUND_TO) * ROUND_TO
    context = min(wanted, _positions(config) or wanted)
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, context_length=context))
