"""What `benchmarks.parity` runs in its processes: a rank in one layout after the other; Hugging Face beside it."""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from algorithms import gspo
from benchmarks.one_rank import one_rank_parallel
from relax_core.config.schema import OptimizerConfig, Schedule
from relax_core.contracts.algorithm import LossInputs, LossOutputs, Needs, StepTotals
from relax_core.contracts.train import StepMetrics, TrainGroup
from relax_core.train import process_group
from relax_core.train.backend import MegatronBackend
from relax_core.train.micro_batches import split_over_ranks
from relax_core.train.rank import RankSetup

VOCABULARY = 51  # odd: two tensor-parallel ranks pad it
STEPS = 2  # what goes wrong only from the second step on (stale parameters, counts of gradients) shows
DEADLINE_S = 60.0
BALANCE = 0.1  # coefficient of the balancing loss
# A step moves a weight by lr * g / (|g| + eps), so with an eps like the gradients' own size it measures these: with a
# tiny one it would be their sign, and the sign of a gradient that is rounding alone is noise.
OPTIMIZER = OptimizerConfig(
    lr=3e-2,
    min_lr_ratio=0.0,
    schedule=Schedule.constant,
    warmup_steps=0,
    beta1=0.9,
    beta2=0.99,
    eps=1e-2,
    weight_decay=0.1,
    clip_grad=1.0,
)
KNOBS = dataclasses.replace(gspo.GspoKnobs(group_size=4), clip_low=0.1, clip_high=0.1)
ENTROPY_WEIGHT = 0.01
TEMPERATURE = 0.9
ONE_RANK = one_rank_parallel(micro_batch_tokens=96, logprob_chunk_tokens=8)


def _loss_with_entropy(inputs: LossInputs, knobs: gspo.GspoKnobs) -> LossOutputs:
    """A ratio a sequence needs the tokens of a sample together, wherever their rows lie."""
    assert inputs.entropy is not None
    outputs = gspo.loss(inputs, knobs)
    bonus = (inputs.entropy * inputs.loss_mask).sum()
    return dataclasses.replace(outputs, loss_sum=outputs.loss_sum - ENTROPY_WEIGHT * bonus)


SPEC = dataclasses.replace(
    gspo.SPEC, loss=_loss_with_entropy, needs=lambda knobs: Needs(old_logprobs="rollout", entropy=True)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of two steps: loss and gradient norm of each; log-probs before and after them; the weights after them; of a
    mixture of experts their loads in each. Of a back end that does not train: the log-probs."""

    losses: list[float]
    grad_norms: list[float]
    logprobs: list[np.ndarray]
    weights: Mapping[str, Tensor]
    loads: list[float] = dataclasses.field(default_factory=list)

    def difference(self, other: Outcome) -> dict[str, float]:
        """The largest absolute ones; of the gradient norm relative to it."""

        def widest(ours: Any, theirs: Any) -> float:
            return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(ours, theirs, strict=True))

        if not self.losses:
            return {"logprobs": widest(self.logprobs, other.logprobs[:1])}
        assert self.weights.keys() == other.weights.keys()
        return {
            "loss": widest(self.losses, other.losses),
            "grad_norm": widest(np.divide(self.grad_norms, other.grad_norms), np.ones(STEPS)),
            "weights": max(float((tensor - other.weights[name]).abs().max()) for name, tensor in self.weights.items()),
            "logprobs": widest(self.logprobs, other.logprobs),
        }

    def save(self, path: Path) -> None:
        arrays = {f"logprobs.{index}": torch.from_numpy(array) for index, array in enumerate(self.logprobs)}
        figures = {"losses": torch.tensor(self.losses), "grad_norms": torch.tensor(self.grad_norms)}
        figures["loads"] = torch.tensor(self.loads)
        save_file({**arrays, **{name: one.double() for name, one in figures.items()}, **self.weights}, path)

    @staticmethod
    def read(path: Path) -> Outcome:
        tensors = load_file(path)
        return Outcome(
            losses=tensors.pop("losses").tolist(),
            grad_norms=tensors.pop("grad_norms").tolist(),
            logprobs=[tensors.pop(f"logprobs.{index}").numpy() for index in range(2)],
            loads=tensors.pop("loads").tolist(),
            weights=tensors,
        )


# -- the models and the data ------------------------------------------------------------------------------------------
def make_model(folder: Path, family: str) -> Any:
    """A tiny random model of four layers: dense with tied embeddings, or of four experts without."""
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


def make_groups() -> list[TrainGroup]:
    """Five groups of ragged prompts and responses, some of their tokens masked."""
    random = np.random.default_rng(0)
    lengths = [[5, 1, 8, 3], [7, 2, 6, 1], [3, 3, 3, 3], [9, 1, 1, 4], [2, 6, 5, 7]]
    groups = []
    for index, (of_group, prompt) in enumerate(zip(lengths, [9, 4, 13, 6, 1], strict=True)):
        tokens = sum(of_group)
        groups.append(
            TrainGroup(
                group_uid=f"g{index}",
                prompt_ids=random.integers(0, VOCABULARY, prompt, dtype=np.int32),
                lengths=np.array(of_group, dtype=np.int64),
                response_ids=random.integers(0, VOCABULARY, tokens, dtype=np.int32),
                loss_mask=random.random(tokens) >= 0.2,
                rollout_logprobs=np.zeros(tokens, dtype=np.float32),
                advantages=np.repeat(random.standard_normal(4), of_group).astype(np.float32),
            )
        )
    return groups


def with_rollout(groups: Sequence[TrainGroup], logprobs: Sequence[np.ndarray]) -> list[TrainGroup]:
    """Sampled by a policy near this one, so that some ratios are clipped and most are not."""
    random = np.random.default_rng(1)
    return [
        dataclasses.replace(group, rollout_logprobs=(mine + 0.1 * random.standard_normal(len(mine))).astype(np.float32))
        for group, mine in zip(groups, logprobs, strict=True)
    ]


def one_sample_each(groups: Sequence[TrainGroup]) -> list[TrainGroup]:
    """Plain packing: the same samples, each a group of its own."""
    found = []
    for group in groups:
        ends = np.cumsum(group.lengths)
        for index, (start, end) in enumerate(zip(ends - group.lengths, ends, strict=True)):
            columns = ("response_ids", "loss_mask", "rollout_logprobs", "advantages")
            cut = {name: getattr(group, name)[start:end] for name in columns}
            length = group.lengths[index : index + 1]
            found.append(dataclasses.replace(group, group_uid=f"{group.group_uid}.{index}", lengths=length, **cut))
    return found


def micro_batches(groups: Sequence[TrainGroup], *, pipeline: bool) -> list[list[TrainGroup]]:
    """In order; the last has one group, so that a second replica gets none. For a ``pipeline`` groups of one sample
    make more of them than it waits for before its first run."""
    others, size = groups[:-1], 2 if pipeline else len(groups) // 2
    return [list(others[start : start + size]) for start in range(0, len(others), size)] + [list(groups[-1:])]


def routed(groups: Sequence[TrainGroup]) -> list[TrainGroup]:
    """With experts to replay that no router would choose: two random ones of four, in each of the four layers."""
    random = np.random.default_rng(2)
    return [
        dataclasses.replace(
            group, routed_experts=random.random((group.packed_tokens, 4, 4)).argsort(-1)[..., :2].astype(np.uint8)
        )
        for group in groups
    ]


# -- one rank ---------------------------------------------------------------------------------------------------------
def make_backend(
    folder: Path,
    *,
    family: str,
    layout: Mapping[str, Any],
    rank: int,
    ranks: int,
    port: int,
    trainable: bool = True,
    balanced: bool = False,
) -> MegatronBackend:
    setup = RankSetup(
        model_folder=folder / family,
        family=family,
        parallel=dataclasses.replace(ONE_RANK, **layout),
        optimizer=OPTIMIZER,
        total_steps=STEPS,
        dtype="float32",
        algorithm=SPEC,
        knobs=KNOBS,
        rank=rank,
        world_size=ranks,
        store_address=f"127.0.0.1:{port}",
        timeout_s=DEADLINE_S,
        seed=0,
        moe_aux_loss_coef=BALANCE if balanced else 0.0,
    )
    return MegatronBackend(setup, temperature=TEMPERATURE, trainable=trainable)


def run_steps(
    backend: MegatronBackend, groups: Sequence[TrainGroup], *, replica: int = 0, layout: Mapping[str, Any]
) -> Outcome:
    """Two steps over the replicas. The weights are whole only on rank 0."""
    replicas = layout.get("dp", 1)
    before = backend.logprobs(groups)
    if not backend.trainable:
        return Outcome(losses=[], grad_norms=[], logprobs=[np.concatenate(before)], weights={})
    metrics: list[StepMetrics] = []
    for step in range(STEPS):
        backend.begin_step(step)
        for batch in micro_batches(groups, pipeline="pp" in layout):
            backend.accumulate(split_over_ranks(batch, replicas)[replica])
        metrics.append(backend.finish_step())
    return Outcome(
        losses=[one.loss for one in metrics],
        grad_norms=[one.grad_norm for one in metrics],
        logprobs=[np.concatenate(before), np.concatenate(backend.logprobs(groups))],
        weights={name: tensor.clone() for name, tensor in backend.export()},
        loads=[figure for one in metrics for figure in one.moe.values()],
    )


def rank_main(folder: Path, *, rank: int, ranks: int, port: int, rows: Sequence[Any]) -> None:
    """Every row of the table that has ``ranks`` ranks; rank 0 writes a line of ``<ranks>.jsonl`` for each."""
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    try:
        for row in rows:
            for packing in row.packings:
                reference = Outcome.read(folder / f"{row.family}.{packing}.safetensors")
                groups = read_groups(folder, row.family, packing)
                backend = make_backend(
                    folder,
                    family=row.family,
                    layout=row.layout,
                    rank=rank,
                    ranks=ranks,
                    port=port,
                    trainable=row.trainable,
                    balanced=packing == "balanced",
                )
                replica = parallel_state.get_data_parallel_rank()
                outcome = run_steps(backend, groups, replica=replica, layout=row.layout)
                if row.trainable:
                    np.testing.assert_allclose(outcome.loads, reference.loads, atol=1e-5, err_msg="experts' loads")
                if rank == 0:
                    line = {"name": row.name, "packing": packing, **outcome.difference(reference)}
                    with (folder / f"{ranks}.jsonl").open("a") as file:
                        file.write(json.dumps(line) + "\n")
            process_group.leave()
    except BaseException:
        (folder / f"{ranks}.{rank}.error").write_text(f"{row.name}, {packing}: {traceback.format_exc()}")
        raise


# -- the references ---------------------------------------------------------------------------------------------------
def reference_main(folder: Path) -> None:
    """The single process in every packing, and Hugging Face with torch's AdamW on one padded batch."""
    torch.set_num_threads(1)
    lines = []
    for family in ("qwen3", "qwen3_moe"):
        model = make_model(folder / family, family)
        backend = make_backend(folder, family=family, layout={}, rank=0, ranks=1, port=0)
        groups = with_rollout(make_groups(), backend.logprobs(make_groups()))
        hugging_face = huggingface_steps(model, groups)
        packings = {"tree": groups, "plain": one_sample_each(groups)}
        if family == "qwen3_moe":
            replayed = routed(make_groups())
            packings |= {"replay": with_rollout(replayed, backend.logprobs(replayed)), "balanced": groups}
        for packing, packed in packings.items():
            balanced = packing == "balanced"
            backend = make_backend(folder, family=family, layout={}, rank=0, ranks=1, port=0, balanced=balanced)
            outcome = run_steps(backend, packed, layout={})
            outcome.save(folder / f"{family}.{packing}.safetensors")
            save_rollout(folder, family, packing, packed)
            if packing in ("tree", "plain"):
                figures = hugging_face.difference(outcome)
                lines.append({"name": f"Hugging Face, {family}", "packing": packing, **figures})
    (folder / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def save_rollout(folder: Path, family: str, packing: str, groups: Sequence[TrainGroup]) -> None:
    np.save(folder / f"{family}.{packing}.npy", np.concatenate([group.rollout_logprobs for group in groups]))


def read_groups(folder: Path, family: str, packing: str) -> list[TrainGroup]:
    groups = one_sample_each(make_groups()) if packing == "plain" else make_groups()
    if packing == "replay":
        groups = routed(groups)
    ends = np.cumsum([len(group.response_ids) for group in groups])[:-1]
    rollout = np.split(np.load(folder / f"{family}.{packing}.npy"), ends)
    return [dataclasses.replace(group, rollout_logprobs=mine) for group, mine in zip(groups, rollout, strict=True)]


def huggingface_steps(model: Any, groups: Sequence[TrainGroup]) -> Outcome:
    """Every sample as a row of one padded batch, the same loss function on its log-probs."""
    model.train()
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": norms, "weight_decay": 0.0}],
        lr=OPTIMIZER.lr,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.eps,
    )
    before, losses, grad_norms = _padded_forward(model, groups)[0].detach().numpy(), [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logprobs, entropy = _padded_forward(model, groups)
        loss, denominator = _loss(logprobs, entropy, groups)
        (loss.loss_sum / denominator).backward()
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)))
        losses.append(float(loss.loss_sum.detach()) / denominator)
        optimizer.step()
    after = _padded_forward(model, groups)[0].detach().numpy()
    return Outcome(losses=losses, grad_norms=grad_norms, logprobs=[before, after], weights=_exported(model))


def _padded_forward(model: Any, groups: Sequence[TrainGroup]) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every response token."""
    samples = one_sample_each(groups)
    sequences = [np.concatenate([one.prompt_ids, one.response_ids]) for one in samples]
    width = max(map(len, sequences))
    ids = torch.tensor(np.array([np.pad(one, (0, width - len(one))) for one in sequences]), dtype=torch.int64)
    attention = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one in sequences])
    every = (model(input_ids=ids, attention_mask=attention).logits / TEMPERATURE).log_softmax(-1)
    parts = [
        (every[row, len(one.prompt_ids) - 1 : len(sequence) - 1], torch.from_numpy(one.response_ids).long())
        for row, (one, sequence) in enumerate(zip(samples, sequences, strict=True))
    ]
    logprobs = torch.cat([table.gather(1, targets[:, None])[:, 0] for table, targets in parts])
    return logprobs, torch.cat([-(table.exp() * table).sum(1) for table, _ in parts])


def _loss(logprobs: Tensor, entropy: Tensor, groups: Sequence[TrainGroup]) -> tuple[LossOutputs, float]:
    def column(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(group, name) for group in groups]))

    lengths = np.concatenate([group.lengths for group in groups])
    mask = column("loss_mask")
    sample_ids = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=column("rollout_logprobs"),
        rollout_logprobs=column("rollout_logprobs"),
        advantages=column("advantages"),
        loss_mask=mask,
        sample_ids=sample_ids,
        num_samples=len(lengths),
        entropy=entropy,
    )
    totals = StepTotals(tokens=int(mask.sum()), samples=len(sample_ids[mask].unique()), groups=len(groups))
    return SPEC.loss(inputs, KNOBS), SPEC.denominator(totals, KNOBS)


def _exported(model: Any) -> dict[str, Tensor]:
    """Under the names on disk; transformers fuses the experts of a layer in memory."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")
