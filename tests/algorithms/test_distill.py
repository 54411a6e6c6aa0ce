"""The requirements and the refused settings of distillation."""

from __future__ import annotations

from typing import Any

import pytest

from algorithms.distill import SPEC, DistillConfig
from relax_core.contracts.algorithm import TeacherRequirements


def test_it_asks_for_top_k_tokens_only_where_the_form_is_about_them() -> None:
    requirements = SPEC.requirements(
        DistillConfig(teachers={"default": None, "math": "/m"}, teacher_key="source", served_by="engine")
    )
    assert requirements.teacher == TeacherRequirements(models={"math": "/m"}, key="source", top_k=0, served_by="engine")
    for form in ("topk_forward", "topk_jsd"):
        of_form = SPEC.requirements(DistillConfig(form=form, top_k=7)).teacher
        assert of_form is not None and of_form.top_k == 7


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"form": "full"}, "algo.form=full: there is no such choice. Use one of: pure, advantage, topk_forward,"),
        ({"served_by": "cloud"}, "algo.served_by=cloud: there is no such choice. Use one of: forward, engine."),
        ({"teacher_coef": 0.0}, "algo.teacher_coef=0.0: must be above 0. Use 1."),
        ({"form": "advantage", "group_size": 1}, "algo.group_size=1: a group of one"),
        ({"top_k": 0}, "algo.top_k=0: must be above 0. Use 16."),
        ({"form": "topk_jsd", "mix": 1.0}, "algo.mix=1.0: must lie between 0 and 1. 0.5 is usual."),
        (
            {"form": "topk_jsd", "kl_coef": 0.1, "kl_placement": "reward"},
            "algo.kl_placement=reward with algo.form=topk_jsd: it uses no reward. Use algo.kl_placement=loss.",
        ),
        ({"form": "topk_jsd", "opsm_threshold": 1e-4}, "algo.opsm_threshold=0.0001 with algo.form=topk_jsd"),
        ({"teachers": {"default": None}}, "algo.teachers names no teacher. Use algo.teachers.default="),
        (
            {"teachers": {"a": "/a", "b": "/b"}},
            "algo.teachers names a, b: with several teachers, algo.teacher_key must name",
        ),
    ],
)
def test_its_own_config_are_checked(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        SPEC.check(DistillConfig(**wrong))
    assert text in str(caught.value)
