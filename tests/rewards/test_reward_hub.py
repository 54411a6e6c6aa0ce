"""Tests that every reward of the hub equals the scorer that it reimplements, except for documented differences."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_core.config.plugin_types import plugin_config
from relax_core.contracts.reward import RewardInput, RewardOutput
from relax_core.registry import find_reward, names
from relax_core.rollout.rewards.reward_pool import RewardPool
from tests.rewards.reward_vectors import FOLDER, Vector, vectors

HUB = sorted(file.stem for file in FOLDER.glob("*.json"))
NEEDS = {"deepscaler": "pylatexenc", "geo3k": "pylatexenc", "ifeval": "if_verifiable", "ifbench": "if_verifiable"}
NEEDS |= {"reasoning_gym": "reasoning_gym"}
WITHOUT_END = "1/(x**9-x-1)+1/(y**9-x-1)+1/((x+y)**9-1)+1/((x-y)**9-2)"  # sympy needs long to simplify this expression
LIMIT_S = 1.0
PIECES = "<think> </think> <answer> </answer> \\boxed{ } { Answer: $ \\frac 1 2 / ^ \\sqrt = , . \\text{ ( ]"
PIECES += " A B correct the % \\ <tool_response> \\left million cm - x é ½ 𝟙 ٣"
TEXTS = st.one_of(
    st.text(max_size=60), st.lists(st.sampled_from([*PIECES.split(" "), "\n", " ", "\0"]), max_size=14).map("".join)
)


def of(vector: Vector) -> RewardInput:
    row = {"prompt": "", "answer": vector.answer, **vector.row}
    return RewardInput(response=vector.response, stopped=True, answer=vector.answer, row=row)


def config_of(reward: str, values: Any) -> Any:
    return plugin_config("reward", reward, values, section="reward")


def scored(reward: str, given: RewardInput, **values: Any) -> RewardOutput:
    spec = find_reward(reward)
    assert spec.score is not None
    output = spec.score(given, config_of(reward, values))
    assert isinstance(output, RewardOutput)
    return output


def test_every_reward_of_the_hub_has_vectors() -> None:
    # These rewards have separate rules in Relax.
    own = {"env", "exact_match", "final_answer", "reverse_digits", "remote", "mix", "genrm"}
    assert set(names("reward")) - own == set(HUB)
    for reward in HUB:
        assert len(vectors(reward)) >= 12, reward


@pytest.mark.parametrize("reward", HUB)
def test_a_reward_equals_its_source(reward: str) -> None:
    if reward in NEEDS:
        pytest.importorskip(NEEDS[reward])
    find_reward(reward).prepare()
    wrong = []
    for number, vector in enumerate(vectors(reward)):
        if "boxed" in vector.settings.values() and not _has("pylatexenc"):
            continue
        assert vector.departs or isinstance(vector.source, float), f"{number}: the source {vector.source}"
        output = scored(reward, of(vector), **vector.settings)
        if output.reward != (None if vector.expected is None else pytest.approx(vector.expected, abs=1e-9)):
            wrong.append((number, vector.response[:60], vector.answer[:40], vector.expected, output))
        assert (output.reward is None) == bool(output.reason), number
        if output.reward is not None:
            assert output.why, number
    assert not wrong


CHOICES = {"choices": ["red fox", "blue whale", "green sea turtle", "brown bear"]}


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("answer choices, B fits", "B"),
        ("The answer depends on it, so (A)", "A"),
        ("the answer can be given as: **B**", "B"),
        (r"The answer is \boxed{\text{C}}", "C"),
        (r"\textbf{(C)}", "C"),
        ("The answer is A. No, the answer is B.", "B"),
        ("option B is wrong, option C is right", "C"),
        ("答案是B", "B"),
        ("A careful look shows C", "C"),
        ("I'm sure: D", "D"),
        ("The answer is B. Option C fails", "B"),
        ("A because red", "A"),
    ],
)
@pytest.mark.parametrize("row", [{}, CHOICES])
def test_gpqa_takes_a_letter_only_as_a_choice(response: str, right: str, row: Mapping[str, Any]) -> None:
    for label in "ABCD":
        answer = RewardInput(response=response, stopped=True, answer=label, row={"answer": label, **row})
        assert scored("gpqa", answer).exact == (label == right)


@pytest.mark.parametrize("response", ["<think>the answer is B", "I do not know.", "it depends", "the answer is"])
def test_gpqa_finds_no_letter_in_words_and_in_a_thinking_that_never_ends(response: str) -> None:
    for label in "ABDI":
        assert scored("gpqa", RewardInput(response=response, stopped=True, answer=label, row={})).reward == 0.0


@pytest.mark.parametrize(
    ("reward", "response", "label", "value"),
    [
        ("dapo", "Answer: 3", "3.5", None),
        ("dapo", "Answer: 0", "-0.5", None),
        ("dapo", "Answer: 9007199254740993", "9007199254740993", 1.0),
        ("dapo", "Answer: 9007199254740992", "9007199254740993", -1.0),
        ("dapo", "Answer: 1, 3", "13", -1.0),
        ("dapo", "Answer: 13", "1, 3", None),
        ("openr1mm", "<answer>3</answer>", "1, 3", 0.0),
        ("openr1mm", "<answer>2, 3</answer>", "1, 3", 0.0),
        ("openr1mm", "<answer>3, 1</answer>", "1, 3", 1.0),
        ("openr1mm", "<answer>3</answer>", "1 and 3", 0.0),
        ("openr1mm", r"<answer>28\%</answer>", "28%", 1.0),
        ("deepscaler", r"</think>\boxed{\sqrt{4}}", r"\sqrt[3]{4}", 0.0),
        ("deepscaler", r"</think>\boxed{\sqrt[3]{\frac{1}{2}}}", r"\sqrt{\frac{1}{2}}", 0.0),
        ("deepscaler", r"</think>\boxed{\sqrt[3]{16}}", r"2\sqrt[3]{2}", 1.0),
        ("deepscaler", r"</think>\boxed{\sqrt[2]{5}}", r"\sqrt{5}", 1.0),
    ],
)
def test_an_answer_or_a_label_is_read_as_no_other_value(
    reward: str, response: str, label: str, value: float | None
) -> None:
    if reward in NEEDS:
        pytest.importorskip(NEEDS[reward])
    given_ = RewardInput(response=response, stopped=True, answer=label, row={"answer": label})
    assert scored(reward, given_).reward == value
    assert _is_refused(find_reward(reward).check_row, given_.row, config_of(reward, {})) == (value is None)


def _has(module: str) -> bool:
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def test_code_in_an_answer_is_never_run(tmp_path: Path) -> None:
    pytest.importorskip("pylatexenc")
    file = tmp_path / "ran"
    for code in (f"__import__('os').mkdir('{file}')", f"open('{file}','w')", f"print(open('{file}','w'))"):
        for reward in ("deepscaler", "geo3k", "math", "openr1mm", "dapo"):
            response = f"<think></think><answer>Answer: \\boxed{{{code}}}</answer>"
            scored(reward, RewardInput(response=response, stopped=True, answer="1", row={}))
    assert not os.path.exists(file)


def _usable(reward: str) -> bool:
    return reward not in NEEDS or _has(NEEDS[reward])


LONG_S = 120.0
ENDS = ("no answer within", "more memory than", "its process died")  # messages for a rule that never ends
QUICK = sorted(name for name in HUB if not find_reward(name).isolated)
# The import of reasoning-gym alone takes seconds, and its scores are in the vectors.
ISOLATED = [name for name in HUB if find_reward(name).isolated and _usable(name) and name != "reasoning_gym"]
INSTRUCTIONS = {
    "ifeval": {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    "ifbench": {"instruction_id_list": ["count:punctuation", "count:numbers"], "kwargs": [{}, {"N": 2}]},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    """Returns a pool with one worker process. Each row names its reward."""
    parts = [{"reward": name, "timeout_s": LIMIT_S} for name in ISOLATED]
    parts += [{"reward": "math", "name": "boxed", "rule": "boxed", "timeout_s": LIMIT_S}] if _usable("geo3k") else []
    config = config_of("f1", {"by": "reward", "parts": parts, "max_failed": 1.0, "timeout_s": 60.0})
    with RewardPool(find_reward("f1"), config, workers=1) as pool:
        yield pool


def soak(value: str) -> Any:
    """Marks a case as soak if it costs several worker processes."""
    return pytest.param(value, marks=pytest.mark.soak)


@pytest.mark.parametrize("response", [r"\boxed{9**9**9}", soak(r"$9^{9^{9^9}}$"), soak("9!!!!!!!!")])
def test_arithmetic_without_end_ends_in_time(pool: RewardPool, response: str) -> None:
    """A rule may reject the arithmetic at once. No rule computes it."""
    for reward in [name for name in ("math", "boxed", "openr1mm", "deepscaler", "geo3k") if _usable(name)]:
        if reward == "boxed" and not _usable("geo3k"):
            continue
        text = f"<think></think>{response}"
        given_ = RewardInput(response=text, stopped=True, answer=r"\sqrt{5}", row={"reward": reward})
        (output,) = asyncio.run(asyncio.wait_for(pool.score([given_]), LONG_S))
        ends = any(end in output.reason for end in ENDS)
        assert output.reward in (0.0, 0.1) or (output.reward is None and ends), (reward, output)


@pytest.mark.parametrize("piece", ["x ", *map(soak, ("12 ", "{[(", "<think>", "</think>", "\\frac{", "a"))])
def test_a_megabyte_is_scored_or_has_no_reward_in_time(pool: RewardPool, piece: str) -> None:
    """The megabyte is text, digits, brackets or tags before an answer that may still be right."""
    response = piece * ((1 << 20) // len(piece)) + "<answer>Answer: \\boxed{42}</answer>"
    for reward in HUB:
        row = {"reward": reward, "answer": "42", "choices": ["red", "42"], **INSTRUCTIONS.get(reward, {})}
        given_ = RewardInput(response=response, stopped=True, answer="42", row=row)
        if reward in QUICK:
            assert isinstance(scored(reward, given_), RewardOutput)
        elif reward in ISOLATED:
            (output,) = asyncio.run(asyncio.wait_for(pool.score([given_]), LONG_S))
            ends = any(end in output.reason for end in (*ENDS, "RecursionError"))
            assert output.reward is not None or ends, (reward, output)


def test_a_value_without_end_has_no_reward_in_time(pool: RewardPool) -> None:
    pytest.importorskip("pylatexenc")
    for reward in ("boxed", "deepscaler", "geo3k"):
        response = f"<think></think>\\boxed{{{WITHOUT_END}}}"
        given_ = RewardInput(response=response, stopped=True, answer=r"\sqrt{5}", row={"reward": reward})
        (output,) = asyncio.run(asyncio.wait_for(pool.score([given_]), LONG_S))
        assert output.reward is None
        # At the memory limit, a C library may crash before Python raises MemoryError.
        ends = ("no answer within 1 s", "more memory than reward.memory_gib=1", "its process died")
        assert any(words in output.reason for words in ends), output.reason


COUNT, COUNT_ISOLATED = 9_800, 200


def test_odd_texts_raise_nothing() -> None:
    """Computes 9,800 scores of rewards that run in the rollout, and 200 scores of other rewards in worker processes."""
    score_odd_texts(COUNT // len(QUICK))


def score_odd_texts(count: int) -> None:
    @settings(max_examples=count, deadline=None, database=None, derandomize=True)
    @given(response=TEXTS, answer=TEXTS)
    def score_all(response: str, answer: str) -> None:
        row = {"answer": answer, "choices": ["red", "blue", answer]}
        for reward in QUICK:
            spec, config = rewards[reward]
            output = spec.score(RewardInput(response=response, stopped=True, answer=answer, row=row), config)  # type: ignore[misc]
            assert isinstance(output, RewardOutput)
            assert (output.reward is None) == _is_refused(spec.check_row, row, config)

    rewards = {reward: (find_reward(reward), config_of(reward, {})) for reward in QUICK}
    score_all()


def _is_refused(check_row: Any, row: Mapping[str, Any], config: Any) -> bool:
    """Returns whether the data check refuses the row. Exactly the refused rows have no reward."""
    try:
        if check_row is not None:
            check_row(row, config)
    except ValueError:
        return True
    return False


def test_odd_texts_hang_nothing_in_worker_processes(pool: RewardPool) -> None:
    score_isolated(pool, COUNT_ISOLATED // len(ISOLATED))


def score_isolated(pool: RewardPool, count: int) -> None:
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(response=TEXTS, answer=TEXTS.filter(str.strip))
    def score_all(response: str, answer: str) -> None:
        for reward in ISOLATED:
            row = {"reward": reward, **INSTRUCTIONS.get(reward, {})}
            given_ = RewardInput(response=response, stopped=True, answer=answer, row=row)
            (output,) = asyncio.run(pool.score([given_]))
            assert output.reward is None or 0 <= output.reward <= 1
            assert "Traceback" not in output.reason and "not an instruction of" not in output.reason

    score_all()
