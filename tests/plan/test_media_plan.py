"""Tests the plan of a run with images and videos: rows, memory, work, and the user's three-line configuration."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from relax_core.config.compose import choices_of, compose, load_config, typed_config
from relax_core.config.errors import NotYet
from relax_core.families.tiny_configs import tiny_config
from relax_core.plan import memory_terms
from relax_core.plan.build_plan import Plan, make_plan
from relax_core.plan.context_length import settle_context
from relax_core.plan.memory_terms import MIB
from relax_core.preflight import CHECKS
from relax_core.registry import find_engine
from relax_core.tools.tiny_media import build_vision_model, write_published, write_settings
from relax_core.tools.tiny_text import build_tokenizer

FLOAT = 4
SEE = ("model=tiny_qwen3_vl", "data=see")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder of Qwen3-VL and a file of rows that alternate between one image and two."""
    folder = tmp_path_factory.mktemp("sees")
    build_tokenizer(vision=True).save_pretrained(folder)
    write_settings(folder, tiny_config("tiny_qwen3_vl"))
    write_published(build_vision_model(tiny_config("tiny_qwen3_vl")), folder)
    rows = [
        {"prompt": "<image>which colour?", "images": [_png(64, 64)], "answer": "red"},
        {"prompt": "<image><image>which?", "images": [_png(128, 32), _png(128, 32)], "answer": "red"},
    ]
    pq.write_table(pa.Table.from_pylist(150 * rows), folder / "geometry.parquet")
    return folder


def _png(width: int, height: int) -> dict[str, bytes | None]:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (220, 40, 40)).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def _line(folder: Path) -> list[str]:
    """Returns the overrides of a user with a published folder. No further key is needed."""
    path = f"data.path={folder}/geometry.parquet"
    return ["model=qwen3_vl", f"model.path={folder}", path, "data.media_keys.image=images"]


def _items(*words: str) -> int:
    return _phase(make_plan(load_config(words)), "items in /dev/shm", "always")["items"]


def _phase(plan: Plan, name: str, phase: str) -> dict[str, int]:
    holder = next(role_holder for role_holder in plan.memory if role_holder.name == name)
    return dict(next(holder_phase for holder_phase in holder.phases if holder_phase.name == phase).terms)


def test_headers_tell_rows_patches_and_bytes(folder: Path) -> None:
    """Patches have 8 x 8 pixels; four patches are a token row. The first data row has 64 patches, the second 2 x 64."""
    config = typed_config(compose([*_line(folder), "data.eval_size=0", "eval.every=0"]))
    plan = make_plan(config)
    media = plan.work.media
    assert media is not None
    assert (media.prompts, media.items, media.rows, media.patches) == (256, 1.5, 24, 96)
    assert (media.nbytes, media.most_patches, media.most_rows, media.item_patches) == (1.5 * 64 * 64 * 3, 128, 32, 64)
    assert _phase(plan, "encode worker", "always")["encoding"] == 51 * MIB + 14 * 64 * 64  # images need no tokenizer
    assert "first 256 rows say: 1.5 media items a prompt, 24 rows, 96 patches" in plan.media[0]


def test_the_users_line_needs_no_further_key(folder: Path) -> None:
    config, problems = settle_context(typed_config(compose(_line(folder))))
    assert problems == []
    assert (config.data.name, config.reward.name, config.optimizer.lr) == ("file", "math", 1e-6)
    assert config.engine.context_length is not None
    assert config.engine.context_length < config.modality.image_tokens[1]  # the context fits the data only


@pytest.mark.parametrize(
    ("arguments", "data", "reward"),
    [
        (["data.path=a.jsonl"], "file", "math"),
        (["data.paths=[a.jsonl,b.jsonl]", "reward=exact_match"], "file", "exact_match"),
        (["data.path=null"], "reverse_digits", "reverse_digits"),
        (["data=file", "data.path=a.jsonl"], "file", "reverse_digits"),
        (["experiment=math_file", "data.path=a.jsonl"], "file", "math"),
    ],
)
def test_files_of_rows_need_no_group(arguments: list[str], data: str, reward: str) -> None:
    chosen = choices_of(arguments)
    assert (chosen["data"], chosen["reward"]) == (data, reward)


def test_the_experiment_names_only_gpus_model_and_data_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_core.preflight.device_files", list)
    monkeypatch.setattr("relax_core.plan.placement.device_files", lambda *_: [])
    config, problems = settle_context(typed_config(compose(["experiment=qwen3_vl_30b_a3b_async_16gpu"])))
    found = [problem for check in CHECKS for problem in check(config)]
    assert problems == []
    assert all(isinstance(problem, NotYet) for problem in found), found
    assert [problem.split(" ")[0].split("=")[0] for problem in found] == ["placement.nodes"], found
    assert "placement.gpus_per_node=8, and this machine has no GPU" in found[0]


def test_frozen_parts_have_no_gradient_and_no_optimizer_state() -> None:
    weights = dict(build_vision_model(tiny_config("tiny_qwen3_vl_moe")).named_parameters())

    def size(belongs: Callable[[str], bool]) -> int:
        return sum(weight.numel() for name, weight in weights.items() if belongs(name))

    projector = size(lambda name: "visual" in name and "merger" in name)
    vision = size(lambda name: "visual" in name) - projector
    router = size(lambda name: name.endswith("mlp.gate.weight"))
    language = sum(weight.numel() for weight in weights.values()) - vision - projector - router
    for frozen, trained in {
        "": vision + projector + router + language,
        "vision": projector + router + language,
        "vision,projector": router + language,
        "language": vision + projector + router,
        "language,vision,router": projector,
    }.items():
        plan = make_plan(load_config(["model=tiny_qwen3_vl_moe", "data=see", f"model.freeze=[{frozen}]"]))
        terms = _phase(plan, "actor", "backward")
        assert terms["weights"] == sum(weight.numel() for weight in weights.values()) * FLOAT
        assert (terms["gradients"], terms["Adam states"]) == (trained * FLOAT, 2 * trained * FLOAT)
        assert plan.transfers.checkpoint_bytes == terms["weights"] + 2 * trained * FLOAT


def test_what_bounds_the_towers_memory() -> None:
    """A block of the tiny tower stores 10 x 32 + 2 x 56 numbers per patch. The largest prompt has 144 patches.

    23 prompts fill a micro-batch, because the towers' work uses a part of its budget.
    """

    def tower(*words: str) -> int:
        return _phase(make_plan(load_config([*SEE, *words])), "actor", "backward")["tower activations"]

    media = make_plan(load_config(SEE)).work.media
    assert media is not None
    whole, block, of_audio = tower(), 10 * 32 + 2 * 56, 3 * (5 * 32 + 72 // 4) + 2 * 3 * 64 + 32
    assert whole == round(23 * media.patches) * (3 * block + of_audio) * FLOAT
    assert tower("parallel.micro_batch_patches=600") == 600 * (3 * block + of_audio) * FLOAT
    assert tower("parallel.micro_batch_patches=64") == 144 * (3 * block + of_audio) * FLOAT  # a prompt is never cut
    assert tower("parallel.recompute=full") == round(23 * media.patches) * (3 * 32 + block + of_audio) * FLOAT
    assert tower("model.freeze=[vision]") == round(23 * media.patches) * 3 * (5 * 32 + 72 // 4) * FLOAT
    assert tower("model.freeze=[vision,projector]") == round(23 * media.patches) * block * FLOAT  # one block's pass


def test_engines_keep_features_up_to_their_cache() -> None:
    """Each row of a prompt has three times 72 numbers. Within one version, 2 x 24 + 256 prompts are requested."""
    plan = make_plan(load_config(SEE))
    assert plan.work.media is not None
    patches = round((2 * 24 + 256) * plan.work.media.patches)
    assert _phase(plan, "engine", "rollout")["tower features"] == patches // 4 * 3 * 72 * FLOAT
    large = make_plan(typed_config(compose(["experiment=qwen3_vl_8b_async_8gpu"])))
    assert _phase(large, "rollout", "rollout")["tower features"] == find_engine("sglang").feature_mib * MIB


def test_a_short_run_stores_only_items_that_it_asks_for(folder: Path) -> None:
    words = ["data.eval_size=0", "eval.every=0", "mode.max_staleness=0", "rollout.prompts_per_step=10"]
    few, all_rows = (_items(*_line(folder), *words, f"run.steps={steps}") for steps in (3, 300))
    assert (few, all_rows) == (30 * 1.5 * 64 * 64 * 3, 300 * 1.5 * 64 * 64 * 3)


def test_encoders_and_items_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (make_plan(load_config([*SEE, f"modality.workers={number}"])) for number in (1, 3))
    counts = [{holder.name: holder.count for holder in plan.memory} for plan in (few, many)]
    assert [count["encode worker"] for count in counts] == [1, 3]
    assert few.work.media is not None
    assert _phase(few, "encode worker", "always")["encoding"] == 68 * MIB + 14 * few.work.media.source_pixels
    with monkeypatch.context() as small:
        small.setattr(memory_terms, "CACHE_BYTES", 1_000_000)
        bounded = make_plan(load_config(SEE))
    assert _phase(bounded, "items in /dev/shm", "always")["items"] == 1_000_000
    items = [_items(*SEE, "eval.every=0", "mode.max_staleness=0", f"run.steps={steps}") for steps in (1, 400)]
    assert bounded.work.media is not None
    an_item = bounded.work.media.nbytes / bounded.work.media.items
    assert 14 * an_item < items[0] < 16 * an_item  # 24 prompts draw 16 times from 192 files, with repetition
    assert 191 * an_item < items[1] <= 192 * an_item
    text = make_plan(load_config([*SEE[:1], "modality=text", "model.task=see"]))
    assert not {"encode worker", "items in /dev/shm"} & {holder.name for holder in text.memory}
