"""Compares a mixture of experts with transformers. Also tests routing replay, balancing and the load counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_model
from tiny_trainer import make_backend, make_groups, train_step

from relax_core.config.choices import Recompute
from relax_core.contracts.tree import TokenTree
from tests.trees import answers_of, of_tokens, prompt_of

EXPERTS, TOP_K, LAYERS = 8, 2, 3


def make_moe(folder: Path, *, normalized: bool = True, seed: int = 0) -> Any:
    """Writes a Qwen3-MoE to a folder and returns the model."""
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 48}
    layers = {"num_hidden_layers": LAYERS, "norm_topk_prob": normalized}
    return make_model(folder, seed=seed, **experts, **layers).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    make_moe(path)
    return path


def groups_of(seed: int = 0) -> list[TokenTree]:
    return make_groups([[5, 1, 8], [7, 2], [3, 3, 3, 3]], prompt_lengths=[9, 4, 12], seed=seed, masked=0.2)


def in_hf(model: Any, group: TokenTree, ask: Any) -> list[Any]:
    """Computes each of the group's samples separately and calls ``ask(output, prompt, response)``."""
    found, prompt = [], prompt_of(group)
    for response in answers_of(group):
        ids = np.concatenate([prompt, response]).astype(np.int64)
        with torch.no_grad():
            output = model(torch.from_numpy(ids)[None], output_router_logits=True)
        found.append(ask(output, len(prompt), torch.from_numpy(ids)))
    return found


def hf_logprobs(output: Any, prompt: int, ids: torch.Tensor) -> np.ndarray:
    logprobs = output.logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
    return logprobs[prompt - 1 :].numpy()


def hf_experts(output: Any, prompt: int, ids: torch.Tensor) -> np.ndarray:
    """Returns the experts that transformers chooses, ``[tokens - 1, layers, top_k]``."""
    return torch.stack([logit.topk(TOP_K, -1).indices for logit in output.router_logits], 1)[:-1].numpy()


def with_hf_experts(model: Any, groups: list[TokenTree]) -> list[TokenTree]:
    """Adds transformers' experts for the prompt and each response. No expert computes a response's last token."""
    done = []
    for group in groups:
        samples = in_hf(model, group, hf_experts)
        prompt = len(prompt_of(group))
        unfed = np.zeros_like(samples[0][:1])
        parts = [samples[0][:prompt], *(part for sample in samples for part in (sample[prompt:], unfed))]
        done.append(group.with_extras(routed_experts=np.concatenate(parts).astype(np.uint8)))
    return done


def shifted(groups: list[TokenTree]) -> list[TokenTree]:
    """Replaces every expert by the next expert."""
    return [group.with_extras(routed_experts=(group.extras["routed_experts"] + 1) % EXPERTS) for group in groups]


@pytest.mark.parametrize("normalized", [True, False])
def test_logprobs_are_those_of_transformers(tmp_path: Path, normalized: bool) -> None:
    model = make_moe(tmp_path, normalized=normalized, seed=3)
    backend = make_backend(tmp_path, family="qwen3_moe", trainable=False)
    groups = groups_of()
    for group, found in zip(groups, backend.logprobs(groups), strict=True):
        expected = np.concatenate(in_hf(model, group, hf_logprobs))
        assert np.abs(of_tokens(group, found) - expected).max() < 2e-5


def test_the_same_experts_change_nothing_and_others_do(folder: Path) -> None:
    from transformers import Qwen3MoeForCausalLM

    backend = make_backend(folder, family="qwen3_moe", trainable=False)
    groups = with_hf_experts(Qwen3MoeForCausalLM.from_pretrained(folder).eval(), groups_of())
    own = np.concatenate(backend.logprobs(groups_of()))
    # The two terms of a sum have a different order.
    assert np.abs(np.concatenate(backend.logprobs(groups)) - own).max() < 1e-6
    assert np.abs(np.concatenate(backend.logprobs(shifted(groups))) - own).max() > 0.1
    assert np.array_equal(np.concatenate(backend.logprobs(groups_of())), own)


def test_what_is_replayed_is_what_the_experts_compute(folder: Path) -> None:
    """Megatron's counts of tokens per expert agree with the experts in the groups."""
    from relax_core.train.model.moe import routers

    backend = make_backend(folder, family="qwen3_moe")
    rng = np.random.default_rng(5)
    groups = []
    for group in groups_of():
        drawn = rng.random((group.rows, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]
        groups.append(group.with_extras(routed_experts=drawn.astype(np.uint16)))
    backend.begin_step(0)
    backend.accumulate(groups[:2])
    backend.accumulate(groups[2:])
    fed = [np.setdiff1d(np.arange(group.rows), [episode.leaves[0] for episode in group.episodes]) for group in groups]
    wanted = np.concatenate([group.extras["routed_experts"][rows] for group, rows in zip(groups, fed, strict=True)])
    for layer, router in enumerate(routers(backend.model_chunks)):
        assert router.chosen.tolist() == np.bincount(wanted[:, layer].reshape(-1), minlength=EXPERTS).tolist()


def gradients(backend: Any, micro_batches: list[list[TokenTree]]) -> dict[str, torch.Tensor]:
    backend.begin_step(0)
    for groups in micro_batches:
        backend.accumulate(groups)
    return {name: parameter.main_grad.clone() for name, parameter in backend.model.named_parameters()}


def test_recomputed_layers_replay_the_experts_of_their_own_micro_batch(folder: Path) -> None:
    plain = make_backend(folder, family="qwen3_moe")
    parallel = replace(plain._parallel, recompute=Recompute.full)
    recomputed = make_backend(folder, family="qwen3_moe", parallel=parallel)
    groups = [
        group.with_extras(routed_experts=np.full((group.rows, LAYERS, TOP_K), (place, place + 3), np.uint8))
        for place, group in enumerate(groups_of())
    ]
    expected = gradients(plain, [[group] for group in groups])
    found = gradients(recomputed, [[group] for group in groups])
    # Like a pipeline, this computes the forward passes of two micro-batches before the first backward pass.
    recomputed.begin_step(0)
    batches = [recomputed.pack([group]) for group in groups]
    losses = [recomputed.loss(batch, recomputed.forward(recomputed.model_chunks[0], batch)) for batch in batches]
    for loss in losses:
        loss.backward()
    under_way = {name: parameter.main_grad.clone() for name, parameter in recomputed.model.named_parameters()}
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        assert (found[name] - gradient).abs().max() <= 1e-5 * scale, name
        assert (under_way[name] - gradient).abs().max() <= 1e-5 * scale, name
    assert expected["decoder.layers.0.mlp.router.weight"].abs().max() > 0


def test_experts_of_another_model_are_refused(folder: Path) -> None:
    backend = make_backend(folder, family="qwen3_moe", trainable=False)
    (group, *_) = groups_of()
    wrong_layers = np.zeros((group.rows, LAYERS + 1, TOP_K), dtype=np.uint8)
    with pytest.raises(ValueError, match=r"group g0: its routed experts have shape .* Check that the engine serves"):
        backend.logprobs([group.with_extras(routed_experts=wrong_layers)])
    unknown = np.full((group.rows, LAYERS, TOP_K), EXPERTS, dtype=np.uint8)
    with pytest.raises(ValueError, match="a token was routed to expert 8, but the model has 8 experts"):
        backend.logprobs([group.with_extras(routed_experts=unknown)])
    flat = np.tile(np.arange(TOP_K, dtype=np.uint8), (group.rows, LAYERS)).reshape(group.rows, 1, -1)
    assert len(backend.logprobs([group.with_extras(routed_experts=flat)])) == 1  # SGLang returns no shape


def test_the_balancing_losss_gradient_is_that_of_its_definition(folder: Path) -> None:
    """The loss is E * sum_e f_e * P_e (Switch Transformer, arXiv 2101.03961, equation 4). The gradient belongs to the
    sum over layers; the metric is the mean over layers.
    """
    from transformers import Qwen3MoeForCausalLM

    coefficient, group = 0.5, groups_of()[0].take([0])
    group = group.with_extras(advantages=np.zeros(group.lengths[0], dtype=np.float32))
    backend = make_backend(folder, family="qwen3_moe", moe_aux_loss_coef=coefficient, optimizer={"clip_grad": 0.0})
    metrics = train_step(backend, [[group]])
    model = Qwen3MoeForCausalLM.from_pretrained(folder)
    ids = group.token_ids[:-1].astype(np.int64)
    losses = []
    for logits in model(torch.from_numpy(ids)[None], output_router_logits=True).router_logits:
        shares = torch.bincount(logits.topk(TOP_K, -1).indices.view(-1), minlength=EXPERTS) / (TOP_K * len(ids))
        losses.append(EXPERTS * (shares * logits.softmax(-1).mean(0)).sum())
    assert metrics.moe["balance_loss"] == pytest.approx(sum(losses).item() / LAYERS, rel=1e-5)
    (coefficient * sum(losses)).backward()
    squares = sum(float((parameter.grad**2).sum()) for parameter in model.parameters() if parameter.grad is not None)
    assert metrics.grad_norm == pytest.approx(squares**0.5, rel=1e-4)


def test_the_balancing_loss_evens_the_load(folder: Path) -> None:
    first: dict[float, float] = {}
    last: dict[float, float] = {}
    for coefficient in (0.0, 1.0):
        backend = make_backend(folder, family="qwen3_moe", moe_aux_loss_coef=coefficient, optimizer={"lr": 3e-3})
        loads = [train_step(backend, [groups_of()], step=step).moe["max_load"] for step in range(12)]
        first[coefficient], last[coefficient] = loads[0], sum(loads[-6:]) / 6  # single steps vary a lot
    assert first[0.0] == first[1.0] > 1.5
    assert last[1.0] < 0.8 * last[0.0]


def test_loads_of_known_counts() -> None:
    from relax_core.train.model.moe import loads

    even = loads(np.full((2, 4), 6.0))
    assert even == {"max_load": 1.0, "min_load": 1.0, "entropy": pytest.approx(1.0)}
    one_of_two = loads(np.array([[6.0, 6.0, 6.0, 6.0], [24.0, 0.0, 0.0, 0.0]]))
    assert one_of_two == {"max_load": 4.0, "min_load": 0.0, "entropy": pytest.approx(0.5)}
