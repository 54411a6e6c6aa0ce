"""The train steps of `benchmarks.train_step`: steps of our backend and of transformers on the same groups.

All steps have GRPO's gradient with the ratio 1 (−Σ A log p over the trained tokens), AdamW, gradient clipping at 1, the
same dtype and threads, and micro-batches of about the same number of token rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_core.contracts.tree import TokenTree
from tests.trees import answers_tree

if TYPE_CHECKING:
    from torch import Tensor

    from relax_core.contracts.media import MediaReader

MICRO_BATCH_TOKENS = 4096
LEARNING_RATE, CLIP_GRAD = 1e-5, 1.0


@dataclass(frozen=True, kw_only=True)
class Size:
    """Holds the sizes of a Qwen3. ``experts``: 0, or the number of experts of width ``feed_forward``, two per token."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 0


SIZES = {
    "dense": Size(hidden=256, feed_forward=768, layers=4, heads=8, kv_heads=2, head_dim=32, vocabulary=8192),
    "moe": Size(hidden=256, feed_forward=256, layers=4, heads=8, kv_heads=2, head_dim=32, vocabulary=8192, experts=8),
    "demo": Size(hidden=64, feed_forward=192, layers=2, heads=4, kv_heads=2, head_dim=16, vocabulary=64),
}


def write_model(folder: Path, size: Size) -> Path:
    """Writes a random model in Hugging Face's format."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": True,
    }
    model: Any
    if size.experts:
        config: Any = Qwen3MoeConfig(
            **common,
            moe_intermediate_size=size.feed_forward,
            num_experts=size.experts,
            num_experts_per_tok=2,
            norm_topk_prob=True,
        )
        model = Qwen3MoeForCausalLM(config)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common, intermediate_size=size.feed_forward))
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    return folder


# -- the data -------------------------------------------------------------------------------------------------------
def response_lengths(samples: int, *, longest: int, mean: float) -> np.ndarray:
    """Returns shuffled long-tailed lengths ``longest`` · x^k, x evenly spaced in 0..1. k sets the mean to ``mean``."""
    even = (np.arange(samples) + 1) / samples

    def lengths(power: float) -> np.ndarray:
        return np.maximum(1, np.round(longest * even**power)).astype(np.int64)

    low, high = 0.0, 64.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths(middle).mean() > mean else (low, middle)
    return np.random.default_rng(0).permutation(lengths(low if mean >= longest else high))


def make_groups(lengths: np.ndarray, *, prompt: int, vocabulary: int) -> list[TokenTree]:
    """Returns random groups of a prompt and its answers. ``lengths`` are in tokens, ``[groups, samples]``."""
    random = np.random.default_rng(1)
    groups = []
    for place, of_group in enumerate(lengths):
        tokens = int(of_group.sum())
        advantages = random.standard_normal(len(of_group)).astype(np.float32)
        groups.append(
            answers_tree(
                f"g{place}",
                random.integers(0, vocabulary, prompt, dtype=np.int32),
                of_group,
                random.integers(0, vocabulary, tokens, dtype=np.int32),
                logprobs=-1.0,
                advantages=np.repeat(advantages, of_group),
            )
        )
    return groups


def as_rows(groups: Sequence[TokenTree]) -> list[TokenTree]:
    """Returns each episode as a separate tree with its own copy of shared rows: plain packing."""
    return [
        replace(group.take([place]), group_uid=f"{group.group_uid}-{place}", counts_group=True)
        for group in groups
        for place in range(len(group.episodes))
    ]


# -- the ways -------------------------------------------------------------------------------------------------------
class Ours:
    """Runs steps of `MegatronBackend` on one rank."""

    def __init__(
        self,
        folder: Path,
        *,
        family: str,
        learning_rate: float = LEARNING_RATE,
        media: MediaReader | None = None,
        dtype: str = "float32",
        threads: int = 1,
    ) -> None:
        from algorithms import grpo
        from benchmarks.one_rank import one_rank_parallel, one_rank_setup
        from relax_core.config.choices import Schedule
        from relax_core.config.schema import OptimizerConfig
        from relax_core.train.policy_backend import MegatronBackend

        optimizer = OptimizerConfig(
            lr=learning_rate,
            min_lr_ratio=0.0,
            schedule=Schedule.constant,
            warmup_steps=0,
            beta2=0.99,
            eps=1e-8,
            weight_decay=0.0,
            clip_grad=CLIP_GRAD,
        )
        setup = one_rank_setup(
            folder,
            family=family,
            parallel=one_rank_parallel(micro_batch_tokens=MICRO_BATCH_TOKENS),
            optimizer=optimizer,
            dtype=dtype,
            threads=threads,
            total_steps=1000,
            algorithm=grpo.SPEC,
            config=grpo.GrpoConfig(old_logprobs="current", correction="none", routing_replay=family.endswith("_moe")),
        )
        self._backend = MegatronBackend(setup, temperature=1.0, media=media)

    @property
    def vision(self) -> Any:
        """Returns the vision tower's module."""
        return self._backend.models[0].vision

    @property
    def audio(self) -> Any:
        """Returns the audio tower's module."""
        return self._backend.models[0].audio

    def step(self, groups: Sequence[TokenTree], *, budget_rows: int = MICRO_BATCH_TOKENS) -> float:
        """Trains one step and returns the gradient norm. ``budget_rows`` is the limit of a micro-batch."""
        from relax_core.train.micro_batches import MicroBatcher

        batcher = MicroBatcher(budget_rows)
        self._backend.begin_step(0)
        for batch in (*batcher.add(groups), batcher.flush()):
            if batch:
                self._backend.accumulate(batch)
        return self._backend.finish_step().grad_norm


class HuggingFace:
    """Runs a plain loop over transformers' model. Computes logits for response tokens only."""

    def __init__(self, folder: Path, *, learning_rate: float = LEARNING_RATE, dtype: str = "float32") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )

    def padded_step(self, rows: Sequence[TokenTree]) -> float:
        """Trains one step over sequences padded to the longest of their micro-batch. ``rows`` come from `as_rows`."""
        longest = max(_length(row) for row in rows)
        together = max(1, MICRO_BATCH_TOKENS // longest)
        return self._step(rows, [rows[at : at + together] for at in range(0, len(rows), together)], self._padded)

    def packed_step(self, rows: Sequence[TokenTree], *, budget: int) -> float:
        """Trains one step over sequences concatenated in one row of at most ``budget`` tokens.

        The positions separate the sequences. transformers' SDPA uses one block-diagonal mask, and the size of the mask
        grows with the square of ``budget``.
        """
        batches: list[list[TokenTree]] = [[]]
        for row in rows:
            if batches[-1] and sum(map(_length, batches[-1])) + _length(row) > budget:
                batches.append([])
            batches[-1].append(row)
        return self._step(rows, batches, self._packed)

    def _step(self, rows: Sequence[TokenTree], batches: Sequence[Sequence[TokenTree]], hidden_states: Any) -> float:
        import torch

        tokens = sum(len(row.sampled) for row in rows)
        self._optimizer.zero_grad()
        for batch in batches:
            logits = self.model.lm_head(hidden_states(batch))
            targets = torch.from_numpy(np.concatenate([row.token_ids[row.sampled] for row in batch]).astype(np.int64))
            logprobs = torch.log_softmax(logits.float(), dim=-1).gather(1, targets[:, None])[:, 0]
            advantages = torch.from_numpy(np.concatenate([row.extras["advantages"] for row in batch]))
            (-(logprobs * advantages).sum() / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD)
        self._optimizer.step()
        return float(norm)

    def _padded(self, batch: Sequence[TokenTree]) -> Tensor:
        """Returns the hidden states that predict the response tokens, ``[tokens, hidden]``."""
        import torch

        width = max(map(_length, batch))
        ids, mask = (torch.zeros(len(batch), width, dtype=torch.int64) for _ in range(2))
        predicting = []
        for line, row in enumerate(batch):
            sequence = _sequence(row)
            ids[line, : len(sequence)], mask[line, : len(sequence)] = sequence, 1
            predicting.append(line * width + torch.from_numpy(row.sampled - 1))
        hidden = self.model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        states: Tensor = hidden.flatten(0, 1)[torch.cat(predicting)]
        return states

    def _packed(self, batch: Sequence[TokenTree]) -> Tensor:
        import torch

        sequences = [_sequence(row) for row in batch]
        positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
        starts = np.cumsum([0, *map(len, sequences)])[:-1]
        predicting = [int(start) + torch.from_numpy(row.sampled - 1) for start, row in zip(starts, batch, strict=True)]
        # With use_cache=True, transformers would not derive the starts of the sequences from the positions.
        outputs = self.model.model(input_ids=torch.cat(sequences)[None], position_ids=positions[None], use_cache=False)
        states: Tensor = outputs.last_hidden_state[0, torch.cat(predicting)]
        return states


def _length(row: TokenTree) -> int:
    return row.rows - 1


def _sequence(row: TokenTree) -> Tensor:
    """Returns the only path of a tree from `as_rows`, without the last token, because it predicts no token."""
    import torch

    return torch.from_numpy(row.token_ids[:-1].astype(np.int64))


def with_own_experts(model: Any, groups: Sequence[TokenTree]) -> list[TokenTree]:
    """Returns the groups with the experts that ``model`` chooses for each token, as an engine's response has them."""
    import torch

    found = []
    for group in groups:
        of_rows: np.ndarray | None = None
        for row, episode in zip(as_rows([group]), group.episodes, strict=True):
            with torch.no_grad():
                logits = model(input_ids=_sequence(row)[None], output_router_logits=True).router_logits
            experts = torch.stack([layer.topk(2, dim=-1).indices for layer in logits], dim=1).to(torch.uint8).numpy()
            if of_rows is None:
                of_rows = np.zeros((group.rows, *experts.shape[1:]), dtype=np.uint8)
            path = group.path(episode.leaves[0])
            of_rows[path[:-1]] = experts
        assert of_rows is not None
        found.append(group.with_extras(routed_experts=of_rows))
    return found
