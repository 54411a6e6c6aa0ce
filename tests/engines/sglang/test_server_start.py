"""Tests the start of an SGLang server: flags, version, and the functions that are replaced on a CPU."""

from __future__ import annotations

import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from relax_core.config.schema import EngineConfig
from relax_core.engines.engine_process import EngineLaunch
from relax_core.engines.sglang.sglang_process import TESTED, version_problem
from relax_core.engines.sglang.sglang_spec import FEATURE_MIB, SPEC, flag_arguments
from relax_core.families.tiny_configs import tiny_config, tiny_omni_files
from relax_core.tools.tiny_media import write_settings


def launch(tmp_path: Path, **engine: object) -> EngineLaunch:
    config = EngineConfig(
        name="sglang",
        count=1,
        tp=2,
        max_running_samples=8,
        max_total_tokens=64,
        context_length=32,
        threads=3,
        **engine,  # type: ignore[arg-type]
    )
    return EngineLaunch(
        model_folder=tmp_path, engine=config, dtype="bfloat16", token_file=tmp_path / "token", log_file=tmp_path / "log"
    )


def test_flags_are_words() -> None:
    flags = {"tp_size": 2, "trust-remote-code": True, "enable-metrics": False, "lora-paths": ["a", "b"]}
    assert flag_arguments(flags) == ["--tp-size=2", "--trust-remote-code", "--lora-paths", "a", "b"]


def test_the_configuration_becomes_flags(tmp_path: Path) -> None:
    words = launch(tmp_path, deterministic=True, mem_fraction=0.5, flags={"schedule-policy": "lpm"}).command()
    assert words[0] == sys.executable and words[1] == "-P"
    for word in (
        "--tp-size=2",
        "--dtype=bfloat16",
        "--max-running-requests=8",
        "--context-length=39",
        "--max-total-tokens=71",
        "--enable-deterministic-inference",
        "--mem-fraction-static=0.5",
        "--schedule-policy=lpm",
        "--load-format=dummy",
    ):
        assert word in words
    assert "--enable-deterministic-inference" not in launch(tmp_path, deterministic=False).command()


def test_our_paths_stay_out_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    environment = launch(tmp_path).environment()
    assert "PYTHONPATH" not in environment
    assert (environment["OMP_NUM_THREADS"], environment["GLOO_SOCKET_IFNAME"]) == ("3", "lo")


def test_tower_features_are_kept_on_every_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this environment variable, SGLang caches no features on a large Hopper GPU."""
    write_settings(tmp_path, tiny_config("tiny_qwen3_vl"))
    monkeypatch.delenv(FEATURE_MIB, raising=False)
    assert int(launch(tmp_path).environment()[FEATURE_MIB]) == SPEC.feature_mib > 0
    monkeypatch.setenv(FEATURE_MIB, "7")
    assert launch(tmp_path).environment()[FEATURE_MIB] == "7"


@pytest.mark.parametrize(
    ("model", "dealt"), [("tiny_qwen3_vl", True), ("tiny_qwen3_omni", False), ("tiny_qwen3", False)]
)
def test_images_are_dealt_to_the_ranks_of_an_engine_as_in_the_trainer(tmp_path: Path, model: str, dealt: bool) -> None:
    """SGLang 0.5.23 ignores the flag for Qwen3-Omni and splits its tower over the ranks."""
    write_settings(tmp_path, tiny_config(model), tiny_omni_files() if model == "tiny_qwen3_omni" else None)
    server = launch(tmp_path)
    assert ("--mm-enable-dp-encoder" in replace(server, shard_media=True).command()) == dealt
    assert "--mm-enable-dp-encoder" not in server.command()


@pytest.mark.parametrize("version", [TESTED, "0.5.23.post1", "0.5.30", "0.5.24+cu130"])
def test_versions_that_are_taken(version: str) -> None:
    assert version_problem(version) is None


@pytest.mark.parametrize("version", ["0.5.22", "0.4.9", "0.6.0", "1.0", "of no known version"])
def test_versions_that_are_refused_name_the_pinned_one(version: str) -> None:
    assert f"Install {TESTED}" in (version_problem(version) or "")


def test_random_numbers_on_a_cpu_are_murmurhash3() -> None:
    """Compares with the C library by the hash's author."""
    import mmh3

    from relax_core.engines.sglang.cpu.sgl_kernel import murmur_hash32

    seeds, positions, columns = [0, 1, 2**63 - 1, 123456789012], [0, 5, 70000, 3], [0, 1, 49, 151935]
    found = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for column, entry in enumerate(columns):
            expected = mmh3.hash(struct.pack("<QII", seed, position, entry), signed=False)
            assert int(found[row, column]) == expected


def test_a_kernel_without_a_stand_in_is_named() -> None:
    from relax_core.engines.sglang.cpu import sgl_kernel

    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.fused_experts_cpu"):
        sgl_kernel.fused_experts_cpu()
