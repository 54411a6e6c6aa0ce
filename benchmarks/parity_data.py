"""Makes the models of `benchmarks.parity`, and its groups in every packing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.family_models import LLAMA3, VOCABULARY, make_family_model
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.tree import TokenTree
from tests.trees import answers_tree, of_tokens, with_experts, with_tokens

BANNED = 50  # with two tensor-parallel ranks, the second rank has this token
# For families other than Qwen3: the variant in benchmarks/family_models.py, and changes to the variant.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"rope_parameters": LLAMA3}),
    "llama": ("llama, llama3 rope", {}),
    "mistral": ("mistral", {}),
}


def make_model(folder: Path, family: str) -> Any:
    """Returns a tiny random model of four layers. Only Qwen3 has tied embeddings."""
    if family in OTHERS:
        variant, changes = OTHERS[family]
        return make_family_model(folder, variant, num_hidden_layers=4, seed=1, **changes)
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_theta": 1000000.0,
        "attn_implementation": "sdpa",
    }
    torch.manual_seed(0)
    if family == "qwen3":
        model: Any = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True))
    else:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **shape,
                tie_word_embeddings=False,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                norm_topk_prob=True,
            )
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter) * 0.1
            parameter.copy_(parameter + noise if "norm" in name else noise)
    model.save_pretrained(folder)
    return model


def make_groups() -> list[TokenTree]:
    """Returns five groups of ragged prompts and responses, with some tokens masked."""
    random = np.random.default_rng(0)
    lengths = [[5, 1, 8, 3], [7, 2, 6, 1], [3, 3, 3, 3], [9, 1, 1, 4], [2, 6, 5, 7]]
    groups = []
    for index, (of_group, prompt) in enumerate(zip(lengths, [9, 4, 13, 6, 1], strict=True)):
        tokens = sum(of_group)
        groups.append(
            answers_tree(
                f"g{index}",
                random.integers(0, VOCABULARY, prompt, dtype=np.int32),
                of_group,
                random.integers(0, VOCABULARY, tokens, dtype=np.int32),
                loss_mask=random.random(tokens) >= 0.2,
                advantages=np.repeat(random.standard_normal(4), of_group).astype(np.float32),
            )
        )
    return groups


def with_rollout(groups: Sequence[TokenTree], logprobs: Sequence[np.ndarray]) -> list[TokenTree]:
    """Returns the groups with rollout log-probs near ``logprobs``, so few ratios are clipped. ``logprobs`` are the
    log-probs of the present policy, ``[rows]`` for each group.
    """
    random = np.random.default_rng(1)
    found = []
    for group, own in zip(groups, logprobs, strict=True):
        mine = of_tokens(group, own)
        moved = (mine + 0.1 * random.standard_normal(len(mine))).astype(np.float32)
        found.append(with_tokens(group, logprobs=moved))
    return found


def one_sample_each(groups: Sequence[TokenTree]) -> list[TokenTree]:
    """Returns the same samples in plain packing: each sample is a group."""
    return [
        dataclasses.replace(group.take([place]), group_uid=episode.uid, counts_group=True)
        for group in groups
        for place, episode in enumerate(group.episodes)
    ]


def micro_batches(groups: Sequence[TokenTree], *, pipeline: bool) -> list[list[TokenTree]]:
    """Splits groups in order. The last micro-batch has one group, so it is empty on a second replica. With ``pipeline``
    micro-batches have two groups; groups of one sample then give more micro-batches than the pipeline collects before
    its first run.
    """
    usable, size = groups[:-1], 2 if pipeline else max(1, len(groups) // 2)
    return [list(usable[start : start + size]) for start in range(0, len(usable), size)] + [list(groups[-1:])]


def routed(groups: Sequence[TokenTree]) -> list[TokenTree]:
    """Returns the groups with experts to replay: in each of the four layers two random experts of four."""
    random = np.random.default_rng(2)
    return [
        with_experts(group, random.random((group.computed_rows, 4, 4)).argsort(-1)[..., :2].astype(np.uint8))
        for group in groups
    ]


def with_kept(groups: Sequence[TokenTree]) -> list[TokenTree]:
    """Returns the groups with kept sets. Kept sets and responses never contain the banned token."""
    random = np.random.default_rng(3)
    found = []
    for group in groups:
        rows, token_ids = group.tokens[1], group.token_ids.copy()
        token_ids[rows] = ids = np.where(token_ids[rows] == BANNED, 0, token_ids[rows])
        mask = random.random((len(ids), VOCABULARY)) < random.choice([0.0, 0.1, 0.5, 1.0], (len(ids), 1))
        mask[np.arange(len(ids)), ids] = True
        mask[:, BANNED] = False
        found.append(with_tokens(dataclasses.replace(group, token_ids=token_ids), kept=KeptTokens.of_mask(mask)))
    return found


def save_rollout(folder: Path, family: str, packing: str, groups: Sequence[TokenTree]) -> None:
    np.save(folder / f"{family}.{packing}.npy", np.concatenate([of_tokens(group, group.logprobs) for group in groups]))


def read_groups(folder: Path, family: str, packing: str) -> list[TokenTree]:
    groups = one_sample_each(make_groups()) if packing == "plain" else make_groups()
    if packing == "replay":
        groups = routed(groups)
    if packing == "kept":
        groups = with_kept(groups)
    ends = np.cumsum([int(group.lengths.sum()) for group in groups])[:-1]
    rollout = np.split(np.load(folder / f"{family}.{packing}.npy"), ends)
    return [with_tokens(group, logprobs=mine) for group, mine in zip(groups, rollout, strict=True)]
