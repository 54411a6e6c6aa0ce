"""Tests the choice by ``model.dtype=auto``, and that the settled configuration contains the choice."""

from __future__ import annotations

import pytest
import yaml

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.config.model_checks import DTYPES, fast_dtype
from relax_core.config.saved_config import to_yaml
from relax_core.preflight import CHECKS, EVAL_CHECKS, settle, settle_evaluation

X86 = "processor\t: 0\nmodel name\t: Xeon bf16\nflags\t\t: fpu avx512f {}\nbugs\t\t: amx_bf16\n\nprocessor\t: 1\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd {} svebf16x\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("cpuinfo", "gpus", "dtype"),
    [
        (X86.format("avx512_bf16"), False, "bfloat16"),
        (X86.format("amx_tile amx_bf16"), False, "bfloat16"),
        (X86.format("avx512_vnni avx512_bf16_x"), False, "float32"),  # only complete flags count, not longer names
        (ARM.format("i8mm bf16"), False, "bfloat16"),
        (ARM.format("i8mm"), False, "float32"),
        ("", False, "float32"),
        (X86.format(""), True, "bfloat16"),
    ],
)
def test_bfloat16_is_for_machines_with_instructions_for_it(cpuinfo: str, gpus: bool, dtype: str) -> None:
    assert fast_dtype(gpus=gpus, cpuinfo=cpuinfo) == dtype


def test_a_settled_configuration_has_the_chosen_type() -> None:
    for checks, how in ((CHECKS, settle), (EVAL_CHECKS, settle_evaluation)):
        config = load_config(["model.dtype=auto"], checks=checks, settle=how)
        assert config.model.dtype in DTYPES
        assert yaml.safe_load(to_yaml(config))["model"]["dtype"] == config.model.dtype
    assert settle(load_config(["model.dtype=auto", "placement=gpu"]))[0].model.dtype == "bfloat16"
    job = ["model.dtype=auto", "launcher=ray_job", "launcher.address=http://127.0.0.1:8265"]
    assert settle(load_config(job))[0].model.dtype == "auto", "the choice is left to the cluster"
    with pytest.raises(ConfigError, match=r"model\.dtype=fp16: expected one of float32, bfloat16, auto\."):
        load_config(["model.dtype=fp16"], settle=settle)
