"""Tests settings with engine=sglang that are refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.compose import compose, load_config, typed_config
from relax_core.config.errors import ConfigError
from relax_core.engines.sglang.sglang_spec import layer_problems, version_problems, vision_problems

SGLANG = ["engine=sglang", "engine.urls=[http://127.0.0.1:30000]"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+engine.flags.tp_size=2"], "engine.flags={'tp_size': 2} is a key of engine=sglang only"),
        (["engine.python=/x"], "engine.python=/x is a key of engine=sglang only"),
        (["engine=sglang", "engine.python=/nowhere"], "engine.python=/nowhere: no such interpreter"),
        (["engine=sglang", "+engine.flags.tp_size=2"], "engine.flags.tp_size: Relax sets --tp-size itself"),
        (["engine=sglang", "+engine.flags.hos=0.0.0.0"], "engine.flags.hos: Relax sets --host itself"),
        (["engine=sglang", "+engine.flags.nnodes=2"], "engine.flags.nnodes: Relax sets --nnodes itself"),
        (
            ["engine=sglang", "+engine.flags.sampling-mask-max-tokens=many"],
            "engine.flags.sampling-mask-max-tokens=many: must be a whole number of tokens, 1 or more",
        ),
        (
            ["engine=sglang", "+engine.flags.sampling_mask_max_tokens=100", "rollout.top_k=200"],
            "rollout.top_k=200 with engine=sglang: at most 100",
        ),
        (["engine=sglang", "+engine.flags.api-key=x"], "it is the run's token"),
        (
            ["engine=sglang", "engine.token_file=/x", "gateway=none"],
            "engine.token_file=/x with gateway=none: it is the key of servers that",
        ),
        ([*SGLANG, "engine.count=2"], "engine.urls names 1 servers. Use engine.count=1"),
        ([*SGLANG[1:], "engine.count=2"], "engine.urls names 1 servers. Use engine.count=1"),
        (
            ["engine.token_file=/x", "gateway=none"],
            "engine.token_file=/x with gateway=none: it is the key of servers that",
        ),
        (
            [*SGLANG[1:], "model=tiny_qwen3_vl", "data=see"],
            "engine.urls with media in prompts: a server of engine=embedded that the run did not start",
        ),
        (["engine=sglang", "engine.urls=[localhost]"], "engine.urls: localhost is not an address of a server"),
        ([*SGLANG, "engine.mem_fraction=0.5"], "engine.mem_fraction=0.5 with engine.urls"),
        ([*SGLANG, "engine.mem_fraction=1.5"], "engine.mem_fraction=1.5: must be more than 0 and less than 1"),
        ([*SGLANG, "rollout.top_p=0.9"], "Add rollout.top_k=2048, or use rollout.top_p=1"),
        (
            [*SGLANG, "rollout.min_p=0.1", "engine.deterministic=false"],
            "Add rollout.top_k=2048, or use rollout.min_p=0",
        ),
        (
            [*SGLANG, "rollout.min_p=0.1", "rollout.top_k=50"],
            "rollout.min_p=0.1 with engine.deterministic=true: SGLang cannot draw by seed under min_p",
        ),
        (
            ["algo=distill", "algo.served_by=engine", "engine=sglang", "rollout.top_k=50"],
            "SGLang scores over the whole vocabulary only. Use algo.served_by=forward",
        ),
        (
            ["algo=distill", "algo.served_by=engine", "engine=sglang", "rollout.banned_token_ids=[4]"],
            "SGLang scores over the whole vocabulary only. Use algo.served_by=forward",
        ),
        ([*SGLANG, "rollout.top_k=5000"], "rollout.top_k=5000 with engine=sglang: at most 4096"),
        (
            [*SGLANG, "model=qwen3_vl", "data.media_keys.video=clip"],
            "data.media_keys.video=clip with engine.urls: a server that the run did not start takes images only",
        ),
        ([*SGLANG, "engine.weight_transport=gloo"], "servers that the run did not start load from its folder"),
    ],
)
def test_it_is_said_with_the_fix(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(overrides)
    assert message in str(refusal.value)


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"other users may read it. Run chmod 600"):
        load_config([*SGLANG, f"engine.token_file={key}"])
    key.chmod(0o600)
    assert load_config([*SGLANG, f"engine.token_file={key}"]).engine.token_file == str(key)


def test_truncation_with_a_finite_top_k_is_taken() -> None:
    assert load_config([*SGLANG, "rollout.top_p=0.9", "rollout.top_k=50"]).rollout.top_k == 50


def test_an_interpreter_without_sglang_is_said(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    (problem,) = version_problems(load_config(["engine=sglang", f"engine.python={fake}"]))
    assert "has no SGLang" in problem and "make sglang-cpu" in problem
    fake.write_text("#!/bin/sh\necho 0.4.1\n")
    (problem,) = version_problems(load_config(["engine=sglang", f"engine.python={fake}"]))
    assert "SGLang 0.4.1 is not supported. Install 0.5.23" in problem


def test_a_family_that_sees_and_that_sglang_cannot_serve_is_named(tmp_path: Path) -> None:
    """SGLang would load the weights of this family, and then wait for a processor that SGLang lacks."""
    file = tmp_path / "qwen9_vl.py"
    file.write_text(
        "import dataclasses\nfrom relax_core.families.builtin_families import QWEN3_VL\n"
        "SPEC = dataclasses.replace(QWEN3_VL, name='qwen9_vl')\n"
    )
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen9_vl"}')
    given = ["engine=sglang", "model=qwen3_vl", f"model.path={folder}", f"model.family={file}"]
    (problem,) = vision_problems(typed_config(compose(given)))
    assert (
        "with engine=sglang: of the models that see it serves qwen3_vl, qwen3_vl_moe, qwen3_omni_moe, qwen3_5, "
        in problem
    )
    assert list(vision_problems(typed_config(compose(["engine=sglang", "model=qwen3_vl"])))) == []


@pytest.mark.parametrize(
    ("text", "urls", "message"),
    [
        ({}, True, None),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, False, None),
        (
            {"layer_types": ["linear_attention", "full_attention"] * 2},
            False,
            "with engine=sglang: full attention is in the layers [1, 3] of config.json, but SGLang computes it in "
            "every 4th layer",
        ),
        ({"layer_types": ["linear_attention", "full_attention"] * 2, "full_attention_interval": 2}, False, None),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, False, None),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, True, None),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.5}, True, None),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            True,
            "partial_rotary_factor=0.5 in rope_parameters of config.json is ignored by servers that the run did not",
        ),
    ],
)
def test_a_hybrid_that_sglang_would_compute_as_another_model_is_refused(
    text: dict[str, Any], urls: bool, message: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    given = [*(SGLANG if urls else ["engine=sglang"]), "model=qwen3_5", f"model.path={tmp_path}"]
    found = list(layer_problems(typed_config(compose(given))))
    assert ([message in problem for problem in found] == [True]) if message is not None else found == []
