"""Tests that samples with top_k, top_p, min_p and banned tokens are on-policy for every role: all roles normalize over
the kept sets, so under the same weights ratios are 1 and divergences are 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from relax_core.config.compose import load_config
from relax_core.contracts import columns as c
from relax_core.contracts.bus import Group
from relax_core.contracts.engine import Generated, SamplingParams
from relax_core.contracts.tree import group_uid
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.engines.sglang.sglang_client import SglangClient
from relax_core.registry import find_algorithm, names
from relax_core.roles.role_context import RunContext
from relax_core.roles.trainer.reference_logprobs import ActorFwdWorker, ReferenceWorker
from relax_core.roles.trainer.teacher_worker import EngineTeacher, ForwardTeacher, TeacherWorker, teacher_columns
from relax_core.rollout.episodes.group_assembly import complete_group
from tests.contracts.engine.harness import SGLANG_PYTHON, VOCAB, make_model, prompts_of, random_prompt
from tests.responses import scored as scored_episodes
from tests.roles.trainer.truncated_rows import (
    BANNED,
    SAMPLES,
    TEMPERATURE,
    TOP_K,
    Recorded,
    Rows,
    head_outputs_of,
    train_groups,
)
from tests.train.rank_server import run_ranks
from tests.train.tiny_trainer import make_backend
from tests.trees import answers_of, of_tokens, prompt_of

TOLERANCE = 2e-5
TOKEN = "token-of-the-run"
BANNED_MASS = 0.3  # minimum probability that the model gives to the banned token
WORDS = VOCAB + 1  # two tensor-parallel ranks pad an odd vocabulary
PROMPTS = [random_prompt(length, seed=length) for length in (3, 9, 20)]
TRUNCATIONS: dict[str, dict[str, Any]] = {
    "banned": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "both": {"top_k": 8, "top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 20, "top_p": 0.95, "min_p": 0.02},
}
# SGLang reports kept sets only with a top_k, and uses seeds only without min_p.
OF_SGLANG: dict[str, dict[str, Any]] = {
    "banned": {},
    "top_p": {"top_k": WORDS, "top_p": 0.9},
    "top_k": {"top_k": 5},
    "both": {"top_k": 8, "top_p": 0.8},
}
ALGORITHMS = [name for name in names("algo") if hasattr(find_algorithm(name).config, "old_logprobs")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model with a high probability of the banned token after all these prompts."""
    path = tmp_path_factory.mktemp("model")
    model = make_model(None, seed=0, tied=False)
    model.resize_token_embeddings(WORDS)
    with torch.no_grad():
        hidden = torch.cat([model.model(torch.tensor([ids])).last_hidden_state[0] for ids in PROMPTS])
        model.lm_head.weight.mul_(0.4)
        model.lm_head.weight[BANNED] = 1.4 * hidden.mean(0) / hidden.mean(0).norm()
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def client(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineClient]:
    run = tmp_path_factory.mktemp("run")
    (run / "token").write_text(TOKEN)
    launch = EngineLaunch(
        model_folder=folder,
        engine=replace(load_config().engine, context_length=512),
        dtype="float32",
        token_file=run / "token",
        log_file=run / "engine.log",
        load_weights=True,
    )
    process = EngineProcess.start(launch)
    client = EngineClient(process.url, TOKEN, request_timeout_s=60.0, control_timeout_s=30.0)
    yield client
    client.close()
    process.stop(timeout_s=5.0)


async def responses_to(client: EngineClient, params: SamplingParams) -> list[Generated]:
    try:
        return [response async for response in client.generate(prompts_of(*PROMPTS), params)]
    finally:
        await client.aclose()


def rows_of(client: EngineClient, truncations: Mapping[str, dict[str, Any]]) -> Rows:
    """Returns the groups in the format of the bus."""
    found: dict[str, list[Group]] = {}
    for name, changes in truncations.items():
        params = SamplingParams(n=SAMPLES, max_new_tokens=24, temperature=TEMPERATURE, banned_token_ids=[BANNED])
        params = msgspec.structs.replace(params, return_kept_tokens=bool(changes), **changes)
        responses = asyncio.run(responses_to(client, params))
        for index, prompt in enumerate(PROMPTS):
            row = complete_group(
                index=index,
                episodes=scored_episodes(
                    [response for response in responses if response.prompt == index],
                    [1.0, 0.0, 0.25, 0.5],
                    index=index,
                    prompt_ids=prompt,
                ),
            )
            assert row.group_uid == group_uid(index) and hasattr(row, "columns")
            assert (c.KEPT_TOKENS in row.columns) == bool(changes)
            leased = Group(
                group_uid=row.group_uid, index=index, uids=row.uids, versions=row.versions, columns=row.columns
            )
            found.setdefault(name, []).append(leased)
    return found


@pytest.fixture(scope="module")
def rows(client: EngineClient) -> Rows:
    return rows_of(client, TRUNCATIONS)


@pytest.fixture(scope="module")
def scored(folder: Path, rows: Rows) -> Rows:
    return scored_by(folder, rows)


def scored_by(folder: Path, rows: Rows) -> Rows:
    """Returns the groups with the columns of actor_fwd, reference, teacher and critic. All of them use one model."""
    backend = make_backend(folder, trainable=False, temperature=TEMPERATURE, banned_token_ids=[BANNED])
    return {name: [annotated(row, backend) for row in of_name] for name, of_name in rows.items()}


def annotated(row: Group, backend: Any) -> Group:
    (logprobs,) = backend.logprobs([c.decode_tree(row)])
    names = (c.OLD_LOGPROBS, c.REFERENCE_LOGPROBS, c.TEACHER_LOGPROBS)
    more = {name: c.encode_column(name, logprobs) for name in names}
    more[c.VALUES] = c.encode_column(c.VALUES, np.zeros_like(logprobs))
    return msgspec.structs.replace(row, columns={**row.columns, **more})


def gap_of(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((mine.detach() - theirs).abs().max())


@pytest.mark.parametrize("old_logprobs", ["rollout", "actor_fwd"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_ratio_is_one_for_every_algorithm(folder: Path, scored: Rows, algorithm: str, old_logprobs: str) -> None:
    check_on_policy(folder, scored, algorithm, old_logprobs)


def check_on_policy(folder: Path, scored: Rows, algorithm: str, old_logprobs: str) -> None:
    """Checks that the KL to the reference is 0 for every placement. The reference is the policy itself."""
    recorded = Recorded(find_algorithm(algorithm))
    config: Any = recorded.spec.config(group_size=SAMPLES, old_logprobs=old_logprobs, kl_coef=0.1)
    backend = make_backend(
        folder, temperature=TEMPERATURE, banned_token_ids=[BANNED], algorithm=recorded.spec, config=config
    )
    for name, of_name in scored.items():
        recorded.seen.clear()
        backend.begin_step(0)
        backend.accumulate(train_groups(of_name, recorded.spec, config))
        backend._read_computed()
        (inputs, outputs), sums = recorded.seen[0], backend._sums
        assert gap_of(inputs.logprobs, inputs.rollout_logprobs) <= TOLERANCE, name
        assert gap_of(inputs.logprobs, inputs.old_logprobs) <= TOLERANCE, name
        assert sums.gap_tokens == len(inputs.logprobs) and sums.gap_max <= TOLERANCE, name
        means = {key: float(total / count) for key, (total, count) in outputs.metric_sums.items()}
        for key in {"ratio", "ratio_low", "ratio_high", "tis_weight"} & means.keys():
            assert means[key] == pytest.approx(1.0, abs=TOLERANCE), (name, key)
        for key in {"reference_kl", "teacher_kl", "old_kl", "clip_low", "clip_high", "tis_cut"} & means.keys():
            assert means[key] == pytest.approx(0.0, abs=TOLERANCE), (name, key)


@pytest.fixture
def sglang_client(folder: Path, tmp_path: Path) -> Iterator[EngineClient]:
    if not SGLANG_PYTHON.is_file():
        pytest.fail(f"{SGLANG_PYTHON} is missing: make sglang-cpu")
    (tmp_path / "token").write_text(TOKEN)
    engine = load_config(["engine=sglang", f"engine.python={SGLANG_PYTHON}"]).engine
    launch = EngineLaunch(
        model_folder=folder,
        engine=replace(engine, context_length=512, max_total_tokens=4096, deterministic=True),
        dtype="float32",
        token_file=tmp_path / "token",
        log_file=tmp_path / "engine.log",
        load_weights=True,
    )
    process = EngineProcess.start(launch)
    times = {"request_timeout_s": 60.0, "control_timeout_s": 30.0}
    client = SglangClient(process.url, TOKEN, **times, ranks=1, vocab_size=WORDS, seeds=True)
    yield client
    client.close()
    process.stop(timeout_s=5.0)


@pytest.mark.sglang
def test_the_ratio_is_one_for_every_algorithm_with_sglang(folder: Path, sglang_client: EngineClient) -> None:
    scored = scored_by(folder, rows_of(sglang_client, OF_SGLANG))
    for algorithm in ALGORITHMS:
        for old_logprobs in ("rollout", "actor_fwd"):
            check_on_policy(folder, scored, algorithm, old_logprobs)


def test_a_kl_in_the_reward_charges_nothing_where_policy_and_reference_are_equal(scored: Rows) -> None:
    """RLOO has this KL by default. With log-probs over all tokens, each token would be charged -log(kept mass)."""
    spec = find_algorithm("rloo")
    with_kl, without = (
        spec.config(group_size=SAMPLES, kl_coef=coef, kl_placement="reward", kl_estimator="k1") for coef in (1.0, 0.0)
    )
    for of_name in scored.values():
        for charged, free in zip(
            train_groups(of_name, spec, with_kl), train_groups(of_name, spec, without), strict=True
        ):
            gap = np.abs(charged.extras["advantages"] - free.extras["advantages"]).max()
            assert gap <= 24 * TOLERANCE  # a sample has at most 24 tokens


def test_without_the_list_a_banned_token_takes_a_third_of_the_mass(folder: Path, rows: Rows) -> None:
    """With the list of banned tokens, the trainer's log-probs equal the engine's. Without the list they differ much."""
    gaps = {}
    for banned in ([BANNED], []):
        backend = make_backend(folder, trainable=False, temperature=TEMPERATURE, banned_token_ids=banned)
        groups = [c.decode_tree(row) for row in rows["banned"]]
        gaps[len(banned)] = np.concatenate(
            [
                of_tokens(group, group.logprobs - own)
                for group, own in zip(groups, backend.logprobs(groups), strict=True)
            ]
        )
    assert np.abs(gaps[1]).max() <= TOLERANCE
    assert -np.expm1(-gaps[0]).mean() >= BANNED_MASS  # each gap is log(1 / (1 - mass))


def test_the_entropy_covers_only_the_kept_tokens(folder: Path, scored: Rows) -> None:
    from transformers import Qwen3ForCausalLM

    recorded = Recorded(find_algorithm("grpo"))
    config = recorded.spec.config(group_size=SAMPLES, entropy_coef=0.01)
    backend = make_backend(
        folder, temperature=TEMPERATURE, banned_token_ids=[BANNED], algorithm=recorded.spec, config=config
    )
    model: Any = Qwen3ForCausalLM.from_pretrained(folder).eval()
    for of_name in scored.values():
        recorded.seen.clear()
        backend.begin_step(0)
        groups = train_groups(of_name, recorded.spec, config)
        backend.accumulate(groups)
        expected = []
        for group in groups:
            mask = np.ones((group.rows, WORDS), bool) if group.kept is None else group.kept.mask()
            mask[:, BANNED] = False
            masks, prompt = np.split(of_tokens(group, mask), np.cumsum(group.lengths)[:-1]), prompt_of(group)
            for response, left in zip(answers_of(group), masks, strict=True):
                ids = np.concatenate([prompt, response])
                with torch.no_grad():
                    logits = model(torch.tensor(ids)[None]).logits[0, len(prompt) - 1 : -1].double()
                logits = (logits / TEMPERATURE).masked_fill(torch.from_numpy(~left), -torch.inf)
                expected.append(torch.distributions.Categorical(logits=logits).entropy())
        entropy = recorded.seen[0][0].entropy
        assert entropy is not None
        assert gap_of(entropy.double(), torch.cat(expected)) <= TOLERANCE


def context_of(keys: Sequence[str], *, model_folder: Path, run_dir: Path) -> RunContext:
    return RunContext(
        config=load_config(keys),
        run_namespace="test",
        namespace="test-0",
        run_dir=run_dir,
        model_folder=model_folder,
        weights_folder=run_dir,
        token_file=run_dir / "token",
        resume_from=None,
        start_step=0,
    )


@pytest.mark.parametrize("kind", [ActorFwdWorker, ReferenceWorker, TeacherWorker])
def test_every_role_that_computes_log_probs_leases_the_sets(kind: Any, folder: Path, tmp_path: Path) -> None:
    class Still(kind):  # type: ignore[misc]
        def work(self) -> None:
            pass

    for keys, leases in (([], False), (["rollout.top_p=0.9"], True), (["rollout.min_p=0.1"], True)):
        worker = Still("still", context_of(keys, model_folder=folder, run_dir=tmp_path), 0)
        assert (c.KEPT_TOKENS in worker.inputs) == leases


class OneEngine:
    """A fake engine directory."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def client(self, engine: int) -> EngineClient:
        return self._client


@pytest.mark.parametrize("served_by", ["forward", "engine"])
def test_a_teacher_that_is_the_student_has_nothing_to_teach(
    folder: Path, client: EngineClient, scored: Rows, served_by: str, tmp_path: Path
) -> None:
    keys = [f"rollout.temperature={TEMPERATURE}", f"rollout.banned_token_ids=[{BANNED}]", "rollout.top_p=0.9"]
    # Id 9999 is a student token that this teacher lacks.
    context = context_of(["algo=distill", *keys], model_folder=folder, run_dir=tmp_path)
    context.config.rollout.banned_token_ids = [BANNED, 9999]
    context = replace(context, teacher_folders={"default": folder})
    teacher: Any = (
        ForwardTeacher(context, folder, top_k=TOP_K)
        if served_by == "forward"
        else EngineTeacher(context, OneEngine(client), 0, top_k=TOP_K)
    )
    recorded = Recorded(find_algorithm("distill"))
    for form in ("topk_forward", "topk_reverse", "topk_jsd"):
        config: Any = recorded.spec.config(group_size=SAMPLES, form=form, top_k=TOP_K)
        backend = make_backend(
            folder, temperature=TEMPERATURE, banned_token_ids=[BANNED], algorithm=recorded.spec, config=config
        )
        pads = 0
        for name, of_name in scored.items():
            found = teacher.score([c.decode_tree(row) for row in of_name])
            taught = []
            for row, scores in zip(of_name, found, strict=True):
                taught.append(msgspec.structs.replace(row, columns={**row.columns, **teacher_columns(scores)}))
                pads += int((scores.top_ids == -1).sum())
            recorded.seen.clear()
            backend.begin_step(0)
            backend.accumulate(train_groups(taught, recorded.spec, config))
            inputs, outputs = recorded.seen[0]
            assert inputs.teacher_logprobs is not None and inputs.top_logprobs is not None
            assert inputs.teacher_top_logprobs is not None
            assert gap_of(inputs.logprobs, inputs.teacher_logprobs) <= TOLERANCE, name
            assert gap_of(inputs.top_logprobs, inputs.teacher_top_logprobs) <= TOLERANCE, name
            for key in ("teacher_kl", "teacher_divergence"):
                total, count = outputs.metric_sums[key]
                assert float(total / count) == pytest.approx(0.0, abs=TOLERANCE), (name, key)
            assert all(
                bool(torch.isfinite(buffer.grad_data).all())
                for chunk in backend.model_chunks
                for buffer in chunk.buffers
            )
        assert pads > 100


def test_two_tensor_parallel_ranks_leave_out_the_same_tokens(folder: Path, rows: Rows, tmp_path: Path) -> None:
    """Compares the engine's log-probs, entropy, and the student's log-probs of teacher tokens, with a padded head."""
    (tmp_path / "rows").write_bytes(msgspec.msgpack.encode(rows))
    script = Path(__file__).parent / "truncated_ranks.py"
    for status, error in run_ranks(str(script), [(folder, tmp_path / "rows", tmp_path)] * 2):
        assert status == 0, error

    def one_rank(**settings: Any) -> Any:
        return make_backend(folder, temperature=TEMPERATURE, banned_token_ids=[BANNED], **settings)

    for name, expected in head_outputs_of(rows, one_rank).items():
        for rank in range(2):
            found = np.load(tmp_path / f"rank{rank}-{name}.npz")
            for source in ("forward", "trainer"):
                assert np.abs(found[source] - expected["engine"]).max() <= TOLERANCE, (name, source)
            for figure in ("entropy", "top_logprobs", "gathered"):
                np.testing.assert_allclose(found[figure], expected[figure], atol=TOLERANCE, rtol=0, err_msg=name)
            assert np.array_equal(found["top_ids"], expected["top_ids"]) and BANNED not in found["top_ids"]
