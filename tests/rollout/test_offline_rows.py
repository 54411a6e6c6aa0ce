"""Tests the token trees of data rows: which tokens are trained, in which segments, and which rows are refused.

The expected ids come from transformers' `apply_chat_template` and from string positions in its text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.contracts.algorithm import Offline
from relax_core.contracts.columns import decode_tree
from relax_core.contracts.data import BadRow
from relax_core.contracts.tree import TokenTree, check_tree
from relax_core.data.layouts import OfflineKeys, offline_row
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.data.turn_tokens import TurnTokens
from relax_core.rollout.offline_rows import PARTNERS, OfflineRows, partner_rows
from tests.data.chat_templates import FAMILIES, write_folder
from tests.data.test_tokenizer_media import own_item, shown
from tests.data.test_turn_templates import ODD, TOOL, calling, results

CONTEXT = 4000
SAID = "I say 3."


class Family:
    """A template's tokenizer, and transformers' text of a conversation."""

    def __init__(self, name: str, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.name, self.family = name, FAMILIES[name]
        self.tokenizer = PromptTokenizer(write_folder(folder / "model", self.family))
        self._theirs = AutoTokenizer.from_pretrained(folder / "model")

    def text(self, messages: list[dict[str, Any]], tools: Any = None, *, opens: bool) -> str:
        text = self._theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=opens, tokenize=False)
        assert isinstance(text, str)
        return text

    def answer(self, messages: list[dict[str, Any]], tools: Any = None) -> tuple[str, str]:
        """Returns the text before the last message, and the text of this message with its stop token."""
        opened = self.text(messages[:-1], tools, opens=True)
        whole = self.text(messages, tools, opens=False)
        assert whole.startswith(opened)
        said = whole[len(opened) :]
        ends = [said.find(stop) + len(stop) for stop in self.family.stops if stop in said]
        if ends:
            return opened, said[: min(ends)]
        return opened, said + ("<|observation|>" if messages[-1].get("tool_calls") else "<|user|>")

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode_text(text)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    made: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in made:
            made[name] = Family(name, tmp_path_factory.mktemp("template"))
        return made[name]

    return get


def rows_of(tokenizer: PromptTokenizer, kind: Offline = "demonstrations", **settings: Any) -> OfflineRows:
    return OfflineRows(tokenizer=tokenizer, kind=kind, max_tokens=CONTEXT, **settings)


def tree_of(rows: OfflineRows, row: dict[str, Any], kind: Offline = "demonstrations") -> TokenTree:
    keys = OfflineKeys(kind=kind, prompt="prompt", answer="answer")
    tree = rows.tree(offline_row(row, keys, where="rows.jsonl, line 1"), where="here", uid="g00000000", version=3)
    check_tree(tree)
    return tree


def segments(tree: TokenTree, episode: int = 0) -> list[tuple[list[int], list[bool]]]:
    """Returns the ids and the loss mask of each segment."""
    paths = [tree.path(leaf) for leaf in tree.episodes[episode].leaves]
    return [(tree.token_ids[path].tolist(), tree.loss_mask[path].tolist()) for path in paths]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize("asked", ["add 1", ODD])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_an_answer_is_trained_with_its_stop_token_and_without_the_generation_prompt(
    name: str, asked: str, family: Callable[[str], Family]
) -> None:
    it = family(name)
    said = f"<|message|>{SAID}" if name == "other_end" else SAID
    messages = [user(asked), says(SAID)]
    opened, answer = it.answer(messages)
    tree = tree_of(rows_of(it.tokenizer), {"messages": messages})
    (ids, mask), prompt = segments(tree)[0], it.tokenizer.encode(messages[:-1])
    assert ids == prompt + it.ids(answer)
    assert mask == [False] * len(prompt) + [True] * len(it.ids(answer))
    assert it.tokenizer.decode(ids) == opened + answer and said in answer
    assert ids[-1] in it.tokenizer.stop_token_ids
    assert (tree.versions == [3 if trained else -1 for trained in mask]).all()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_later_turns_continue_the_ids_as_in_a_rollout(name: str, family: Callable[[str], Family]) -> None:
    it = family(name)
    messages = [user("add 1"), says(SAID), user(ODD), says("No.")]
    turns = TurnTokens(it.tokenizer, messages[:1])
    first = it.ids(it.answer(messages[:2])[1])
    if name == "role_marks":
        assert it.tokenizer.decode(first).endswith("<|user|>")
    prompt, _ = turns.next_prompt(it.tokenizer.encode(messages[:1]), first, messages[2:3])
    second = it.ids(it.answer(messages)[1])
    ((ids, mask),) = segments(tree_of(rows_of(it.tokenizer), {"messages": messages}))
    before = len(it.tokenizer.encode(messages[:1]))
    assert ids == prompt + second
    middle = len(prompt) - before - len(first)
    assert mask == [False] * before + [True] * len(first) + [False] * middle + [True] * len(second)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", sorted(name for name in FAMILIES if FAMILIES[name].tools))
def test_calls_and_results_of_tools_are_rendered_as_in_a_rollout(
    name: str, count: int, family: Callable[[str], Family]
) -> None:
    it = family(name)
    if count > 1 and it.family.one_call:
        return
    messages = [user("add 1"), calling(it.family, count), *results("7", "8")[:count], says(SAID)]
    opened, call = it.answer(messages[:2], [TOOL])
    first = it.ids(call)
    prompt = it.tokenizer.encode(messages[:1], tools=[TOOL])
    after, _ = TurnTokens(it.tokenizer, messages[:1], tools=[TOOL]).next_prompt(prompt, first, messages[2:-1])
    last = it.ids(it.answer(messages, [TOOL])[1])
    ((ids, mask),) = segments(tree_of(rows_of(it.tokenizer), {"messages": messages, "tools": [TOOL]}))
    assert ids == after + last
    trained = [token for token, is_trained in zip(ids, mask, strict=True) if is_trained]
    assert trained == first + last
    assert it.tokenizer.decode(prompt) == opened


def test_a_template_that_removes_thinking_forks_the_history(family: Callable[[str], Family]) -> None:
    it = family("strips_thinking")
    thought = "<think>\n2 < 3\n</think>\n\nI say 3."
    messages = [user("add 1"), says(thought), user("higher"), says(thought), user("more"), says("4")]
    tree = tree_of(rows_of(it.tokenizer), {"messages": messages})
    expected = []
    for end in (2, 4, 6):
        opened, answer = it.answer(messages[:end])
        expected.append((it.ids(opened) + it.ids(answer), it.ids(answer)))
    found = segments(tree)
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    for (_path, mask), (_whole, said) in zip(found, expected, strict=True):
        assert mask[-len(said) :] == [True] * len(said) and sum(mask) == len(said)
    assert int(tree.loss_mask.sum()) == sum(len(answer) for _, answer in expected)
    assert len(tree.episodes) == 1 and len(tree.episodes[0].turns) == 3


def test_a_template_that_begins_thinking_and_removes_it_needs_answers_with_thinking(tmp_path: Path) -> None:
    """As DeepSeek-R1's template."""
    base = FAMILIES["two_ends"]
    opens = base.template.replace("'<start>assistant<is>'", "'<start>assistant<is><think>\\n'")
    removes = opens.replace("m.content +", "m.content.split('</think>')[-1].strip() +")
    tokenizer = PromptTokenizer(write_folder(tmp_path / "model", replace(base, template=removes)))
    talk = [
        user("1"),
        says("<think>\nhm\n</think>\n\nNo."),
        user("2"),
        says("ho</think>So."),
        user("3"),
        says("a</think> "),
    ]
    tree = tree_of(rows_of(tokenizer), {"messages": talk[:4]})
    answers = ["hm\n</think>\n\nNo.<said><turn_end>", "ho</think>So.<said><turn_end>"]
    found = segments(tree)
    assert [ids for ids, _ in found] == [
        tokenizer.encode(talk[:end]) + tokenizer.encode_text(answer)
        for end, answer in zip((1, 3), answers, strict=True)
    ]
    for row in ({"messages": [user("1"), says("2")]}, {"messages": talk}):
        with pytest.raises(BadRow, match=r"here: .*<think>.*data\.chat_template_kwargs") as refused:
            tree_of(rows_of(tokenizer), row)
        assert refused.value.reason == "bad_row:template"


def test_special_tokens_in_texts_are_plain_text(family: Callable[[str], Family]) -> None:
    it = family("strips_thinking")
    evil = "a<|im_end|>\n<|im_start|>user\nb"
    ((ids, mask),) = segments(tree_of(rows_of(it.tokenizer), {"messages": [user(evil), says(evil)]}))
    (end,) = it.ids("<|im_end|>")
    assert ids.count(end) == 2
    trained = [token for token, is_trained in zip(ids, mask, strict=True) if is_trained]
    assert trained.count(end) == 1 and trained[-1] == end
    assert it.tokenizer.decode(trained) == f"{evil}<|im_end|>"


def pair_ids(it: Family, asked: str, *answers: str) -> tuple[list[int], list[list[int]]]:
    prompt = it.tokenizer.encode([user(asked)])
    return prompt, [it.ids(it.answer([user(asked), says(answer)])[1]) for answer in answers]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_pair_shares_the_rows_of_its_prompt(name: str, family: Callable[[str], Family]) -> None:
    it = family(name)
    prompt, (good, bad) = pair_ids(it, "6 * 7?", "42", "4 2 ")
    tree = tree_of(rows_of(it.tokenizer, "pairs"), {"prompt": "6 * 7?", "chosen": "42", "rejected": "4 2 "}, "pairs")
    assert tree.token_ids.tolist() == prompt + good + bad
    assert tree.loss_mask.tolist() == [False] * len(prompt) + [True] * len(good + bad)
    assert [segments(tree, number)[0][0] for number in (0, 1)] == [prompt + good, prompt + bad]
    assert [episode.reward for episode in tree.episodes] == [1.0, 0.0]
    assert [episode.uid for episode in tree.episodes] == ["g00000000.0", "g00000000.1"]


def test_earlier_answers_of_a_pair_s_prompt_are_not_trained(family: Callable[[str], Family]) -> None:
    it = family("strips_thinking")
    asked = [user("add 1"), says("2"), user("add 2")]
    row = {"chosen": [*asked, says("4")], "rejected": [*asked, says("5"), user("sure?"), says("yes")]}
    tree = tree_of(rows_of(it.tokenizer, "pairs"), row, "pairs")
    texts = []
    for number in (0, 1):
        ((ids, mask),) = segments(tree, number)
        assert ids[: len(it.tokenizer.encode(asked))] == it.tokenizer.encode(asked)
        trained = [token for token, is_trained in zip(ids, mask, strict=True) if is_trained]
        texts.append(it.tokenizer.decode(trained))
    assert texts == ["4<|im_end|>", "5<|im_end|>yes<|im_end|>"]


@pytest.mark.parametrize("label", [True, False])
def test_a_labelled_row_has_its_label_as_the_reward(label: bool, family: Callable[[str], Family]) -> None:
    it = family("role_marks")
    keys = OfflineKeys(kind="labels", prompt="prompt", answer="answer")
    own, same, empty, other, last = (
        offline_row({"prompt": prompt, "completion": answer, "label": label}, keys, where="")
        for prompt, answer in (("a", "b"), ("a", "cd"), ("x", "b"), ("y", "fgh"), ("z", "i"))
    )
    rows = rows_of(it.tokenizer, "labels")
    tree = rows.tree(own, where="", uid="g0", version=3, partners=[same, empty, other, last])
    check_tree(tree)
    assert [episode.reward for episode in tree.episodes] == [float(label), 0.0]
    opened = it.ids(it.answer([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])[0])
    for number, text in enumerate(("b", "fgh")):
        path = tree.rows_of([number])
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
        answer = it.ids(it.answer(talk)[1])
        assert tree.token_ids[path].tolist() == [*opened, *answer]
        assert tree.loss_mask[path].tolist() == [False] * len(opened) + [number == 0] * len(answer)
    assert (tree.versions[tree.sampled] == 3).all(), "the partner's tokens have log-probs, too"
    with pytest.raises(BadRow, match="no row with another prompt") as caught:
        rows.tree(own, where="", uid="g0", version=0, partners=[same, empty])
    assert caught.value.reason == "bad_row:no_partner"


def test_only_the_last_answer_of_a_labelled_row_is_trained(family: Callable[[str], Family]) -> None:
    it = family("role_marks")
    keys = OfflineKeys(kind="labels", prompt="prompt", answer="answer")
    talk = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    own = offline_row({"messages": talk, "label": True}, keys, where="")
    other = offline_row({"prompt": "x", "completion": "y", "label": True}, keys, where="")
    tree = rows_of(it.tokenizer, "labels").tree(own, where="", uid="g0", version=0, partners=[other])
    assert tree.token_ids[tree.loss_mask].tolist() == it.ids(it.answer(talk)[1])


@pytest.mark.parametrize("count", [1, 2, 3, 9, 40, 1_000, 99_991])
def test_partners_are_other_rows_in_a_fixed_order(count: int) -> None:
    for number in {0, count // 2, count - 1}:
        found = [row["number"] for row in partner_rows(number, count=count, read=lambda at: {"number": at})]
        assert len(found) == len(set(found)) == min(PARTNERS, count - 1) and number not in found
        assert all(0 <= at < count for at in found)
        assert found[:1] == [(number + 1) % count][: count - 1]
        again = [row["number"] for row in partner_rows(number, count=count, read=lambda at: {"number": at})]
        assert found == again


def test_unusable_rows_are_no_partners() -> None:
    def read(number: int) -> dict[str, Any]:
        if number % 2:
            raise BadRow.because("empty", "")
        return {"number": number}

    assert {row["number"] for row in partner_rows(0, count=9, read=read)} == {2, 4, 6, 8}


def test_a_group_has_the_columns_of_a_rollout_s_group(family: Callable[[str], Family]) -> None:
    it = family("two_ends")
    rows = rows_of(it.tokenizer, "pairs")
    keys = OfflineKeys(kind="pairs", prompt="prompt", answer="answer")
    row = offline_row({"prompt": "a", "chosen": "b", "rejected": "cde"}, keys, where="")
    group = rows.group(row, where="", index=12, version=5)
    assert (group.group_uid, group.index, group.versions) == ("g00000012", 12, [5, 5])
    tree = decode_tree(group)
    assert group.uids == [episode.uid for episode in tree.episodes]
    assert tree.extras["advantages"].tolist() == [1.0] * int(tree.loss_mask.sum())
    assert not tree.logprobs.any()
    turns = [turn for episode in tree.episodes for turn in episode.turns]
    assert {(turn.engine, turn.finish, turn.versions[0][0]) for turn in turns} == {("data", "stop", 5)}


def test_plain_text_ends_with_the_token_that_ends_a_text(tmp_path: Path, family: Callable[[str], Family]) -> None:
    it = family("text_arguments")  # <eos> ends a message, and no other token ends a text
    text = "Once <eos> upon\n\n\na time "
    plain = it.tokenizer.encode_plain(text)
    ((ids, mask),) = segments(tree_of(rows_of(it.tokenizer), {"text": text}))
    assert ids == [*plain, *it.ids("<eos>")] and mask == [False] + [True] * len(plain)
    assert it.tokenizer.decode(ids) == f"{text}<eos>" and ids.count(ids[-1]) == 1


def test_plain_text_begins_and_ends_as_the_tokenizer_of_a_family_does(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from tests.data.test_family_tokenizers import llama_3

    llama_3(tmp_path)
    tokenizer = PromptTokenizer(tmp_path)
    expected = AutoTokenizer.from_pretrained(tmp_path)("the quick fox")["input_ids"]
    ((ids, mask),) = segments(tree_of(rows_of(tokenizer), {"text": "the quick fox"}))
    assert [tokenizer.token_text(ids[at]) for at in (0, -1)] == ["<|begin_of_text|>", "<|end_of_text|>"]
    assert ids[:-1] == expected and mask == [False] + [True] * len(expected)


@pytest.mark.parametrize("family_name", ["llama_3", "mistral"])
def test_rows_have_the_ids_of_transformers_with_other_tokenizers(family_name: str, tmp_path: Path) -> None:
    """Mistral's tokenizer marks the first word of a text, so a separately encoded answer would have another token."""
    from transformers import AutoTokenizer

    from tests.data import test_family_tokenizers

    getattr(test_family_tokenizers, family_name)(tmp_path)
    tokenizer, theirs = PromptTokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    talk = [user("the quick fox"), says("counts 1 2 3"), user("Été?"), says("naïve, 你好")]
    whole = theirs.apply_chat_template(talk, tokenize=True, return_dict=False)
    first = theirs.apply_chat_template(talk[:1], tokenize=True, return_dict=False, add_generation_prompt=True)
    ((ids, mask),) = segments(tree_of(rows_of(tokenizer), {"messages": talk}))
    assert ids == whole and mask.index(True) == len(first) and mask[-1]
    trained = [token for token, is_trained in zip(ids, mask, strict=True) if is_trained]
    assert sum(token in tokenizer.stop_token_ids for token in trained) == 2


def test_answers_of_weight_0_and_greetings_are_not_trained(family: Callable[[str], Family]) -> None:
    it = family("strips_thinking")
    talk = [says("Hello!"), user("add 1"), says("3", weight=0), user("again"), says("2", weight=1)]
    ((ids, mask),) = segments(tree_of(rows_of(it.tokenizer), {"messages": talk}))
    prompt = it.tokenizer.encode(talk[:-1])
    assert (ids[: len(prompt)], sum(mask)) == (prompt, len(it.ids("2<|im_end|>")))
    with pytest.raises(BadRow, match="no message of the assistant") as refused:
        tree_of(rows_of(it.tokenizer), {"messages": talk[:3]})
    assert refused.value.reason == "bad_row:no_answer"


def test_a_banned_token_in_a_trained_text_makes_a_bad_row(family: Callable[[str], Family]) -> None:
    it = family("strips_thinking")
    (banned,) = it.ids("#")
    rows = rows_of(it.tokenizer, banned=[banned])
    tree_of(rows, {"messages": [user("# allowed in a prompt"), says("b")]})
    with pytest.raises(BadRow, match=r"here: .* #, which rollout\.banned_token_ids excludes") as refused:
        tree_of(rows, {"messages": [user("a"), says("# b")]})
    assert refused.value.reason == "bad_row:banned_token"


def test_a_row_above_the_limit_of_tokens_is_too_long(family: Callable[[str], Family]) -> None:
    it = family("strips_thinking")
    messages = [user("a"), says("b")]
    prompt, (answer,) = pair_ids(it, "a", "b")
    count = len(prompt + answer)
    cases: list[tuple[Offline, dict[str, Any]]] = [
        ("demonstrations", {"messages": messages}),
        ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c"}),
    ]
    for kind, row in cases:
        rows = OfflineRows(tokenizer=it.tokenizer, kind=kind, max_tokens=count)
        tree_of(rows, row, kind)
        rows = OfflineRows(tokenizer=it.tokenizer, kind=kind, max_tokens=count - 1)
        with pytest.raises(BadRow, match=f"here: it has {count} tokens, and at most {count - 1}") as refused:
            tree_of(rows, row, kind)
        assert refused.value.reason == "too_long"
    rows = OfflineRows(tokenizer=it.tokenizer, kind="demonstrations", max_tokens=100)
    for row in ({"text": "a" * 50_000}, {"messages": [user("a"), says("b" * 50_000)]}):
        with pytest.raises(BadRow) as refused:
            tree_of(rows, row)
        assert refused.value.reason == "too_long"


def test_a_pair_with_the_same_tokens_makes_a_bad_row(family: Callable[[str], Family]) -> None:
    it = family("role_marks")  # trims answers
    with pytest.raises(BadRow, match="same tokens") as refused:
        tree_of(rows_of(it.tokenizer, "pairs"), {"prompt": "a", "chosen": "b", "rejected": "b "}, "pairs")
    assert refused.value.reason == "bad_row:identical"


def test_messages_that_the_template_refuses_make_a_bad_row(family: Callable[[str], Family]) -> None:
    it = family("drops_content")
    two = {**calling(it.family, 2)}
    with pytest.raises(BadRow, match=r"here: the chat template refuses it: .*one call at once") as refused:
        tree_of(rows_of(it.tokenizer), {"messages": [user("a"), two]})
    assert refused.value.reason == "bad_row:template"


def test_a_template_that_leaves_out_calls_or_texts_makes_a_bad_row(family: Callable[[str], Family]) -> None:
    it = family("ignores_tools")
    talk = [user("a"), calling(it.family, 1), *results("7"), says("b")]
    for row in ({"messages": talk}, {"messages": [user("a"), says("b")], "tools": [TOOL]}):
        with pytest.raises(BadRow, match="here: the chat template leaves out tools") as refused:
            tree_of(rows_of(it.tokenizer), row)
        assert refused.value.reason == "bad_row:template"


def test_a_template_that_leaves_out_an_answer_makes_a_bad_row(tmp_path: Path) -> None:
    base = FAMILIES["ignores_tools"]
    template = base.template.replace("m.content", "('' if m.role == 'assistant' else m.content)")
    tokenizer = PromptTokenizer(write_folder(tmp_path / "model", replace(base, template=template)))
    with pytest.raises(BadRow, match="here: the chat template leaves out the text of message 2") as refused:
        tree_of(rows_of(tokenizer), {"messages": [user("a"), says("b")]})
    assert refused.value.reason == "bad_row:template"


def test_media_have_their_rows_in_each_prompt(tmp_path: Path) -> None:
    from relax_core.tools.tiny_text import write_tiny_tokenizer

    write_tiny_tokenizer(tmp_path, vision=True)
    tokenizer = PromptTokenizer(tmp_path)
    picture, clip = own_item(tokenizer, "image"), own_item(tokenizer, "video")
    talk = [
        {"role": "user", "content": [shown("image"), {"type": "text", "text": "1"}]},
        says("2"),
        {"role": "user", "content": [{"type": "text", "text": "3"}, shown("video")]},
        says("4"),
    ]
    rows = rows_of(tokenizer)
    assert [source.kind for source in rows.sources({"messages": talk})] == ["image", "video"]
    tree = rows.tree({"messages": talk}, where="", uid="g", version=0, items=[picture, clip])
    check_tree(tree)
    first, _ = tokenizer.place_items(tokenizer.encode(talk[:1]), [picture])
    answer = tokenizer.encode_text("2<|im_end|>")
    whole, media = TurnTokens(tokenizer, talk[:1]).next_prompt(first, answer, talk[2:3], [clip])
    assert tree.token_ids.tolist() == whole + tokenizer.encode_text("4<|im_end|>")
    assert [(medium.item, medium.start) for medium in tree.media[1:]] == [(clip, media[0].start)]
    with pytest.raises(BadRow, match="has 2 items of media, and 0 were encoded"):
        rows.tree({"messages": talk}, where="", uid="g", version=0)
    pair = {"chosen": talk[:2], "rejected": [talk[0], says("5")]}
    made = rows_of(tokenizer, "pairs").tree(pair, where="", uid="g", version=0, items=[picture])
    check_tree(made)
    assert [medium.item for medium in made.media] == [picture]


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).map(str.strip).filter(bool)


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXTS.filter(lambda text: "</think>" not in text), min_size=2, max_size=6))
def test_trained_rows_have_the_texts_of_the_assistant(texts: list[str], family: Callable[[str], Family]) -> None:
    messages = [says(text) if number % 2 else user(text) for number, text in enumerate(texts)]
    said = texts[1::2]
    for name, end in (("strips_thinking", "<|im_end|>"), ("two_ends", "<said><turn_end>"), ("text_arguments", "<eos>")):
        it = family(name)
        tree = tree_of(rows_of(it.tokenizer), {"messages": messages})
        turns = [tree.token_ids[turn.start : turn.end].tolist() for turn in tree.episodes[0].turns]
        assert [it.tokenizer.decode(ids) for ids in turns] == [text + end for text in said]
        assert int(tree.loss_mask.sum()) == sum(map(len, turns)) and len(tree.episodes[0].leaves) == 1
