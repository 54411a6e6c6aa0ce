"""Tests the forest of a session's messages: it matches histories that clients rewrite with the sampled answers."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.rollout.agents.chat_messages import ChatCall, ChatMessage, Reply, compared, same_json
from relax_core.rollout.agents.conversation_tree import ConversationTree, TreeAnswer, TreePosition

ASK = ChatMessage(role="user", content="12*7 ?")


def reply(content: str = "", *, calls: tuple[ChatCall, ...] = (), reasoning: str = "", stop: str = "") -> Reply:
    return Reply(content=content, full=content + stop, reasoning=reasoning, calls=calls)


def answered(forest: ConversationTree, messages: list[ChatMessage], said: Reply, *, tools: str = "") -> TreeAnswer:
    walk = forest.walk(messages, tools=tools)
    answer = forest.ask(walk, kind=(), prompt_ids=[], whole=walk.known is None)
    answer.reply, answer.given = said, True
    return answer


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def said(text: str, *calls: ChatCall) -> ChatMessage:
    return ChatMessage(role="assistant", content=text, calls=calls)


# -- match grades -----------------------------------------------------------------------------------------------------
CALL = ChatCall(name="calc", arguments='{"expression":  "12*7",\n "note": null, "x": 1.0}', id="a")
THOUGHT = reply("Let me see. ", calls=(CALL,), reasoning="hmm")
STOPPED = reply("Thought: go\n<code>\nprint(1)\n", stop="</code>")


@pytest.mark.parametrize(
    ("message", "sampled", "grade", "rest"),
    [
        (said("Let me see. ", CALL), THOUGHT, "same", ""),
        # langchain drops the thinking and rewrites the arguments. anthropic's client drops trailing blanks of the text.
        (said("Let me see.", dataclasses.replace(CALL, arguments='{"x":1,"note":null,"expression":"12*7"}', id="b")),
         THOUGHT, "same", ""),
        (dataclasses.replace(THOUGHT.message(), reasoning="hmm\n"), THOUGHT, "same", ""),
        (dataclasses.replace(THOUGHT.message(), reasoning="other"), THOUGHT, "foreign", ""),
        # pydantic-ai puts thinking in tags if it does not know that the model returns thinking separately.
        (said("<think>\nhmm\n</think>Let me see. ", CALL), THOUGHT, "same", ""),
        (said("<think>\nother\n</think>Let me see. ", CALL), THOUGHT, "foreign", ""),
        (said("<think>\nhmm\n</think>\nYes. And so on."), reply("Yes.", reasoning="hmm"), "begins", " And so on."),
        (said("<think>a</think>b"), reply("<think>a</think>b"), "same", ""),
        (said("Let me see. "), THOUGHT, "foreign", ""),
        (said("", dataclasses.replace(CALL, arguments='{"expression": "12*8"}')), THOUGHT, "foreign", ""),
        # smolagents' tool agent writes the calls as text.
        (said("Let me see. \nCalling tools:\n[{'id': 'a'}]"), THOUGHT, "foreign", ""),
        # smolagents' code agent restores the stop string and appends a note.
        (said(STOPPED.full), STOPPED, "same", ""),
        (said(STOPPED.content), STOPPED, "same", ""),
        (said(STOPPED.full + "\nCalling tools: x"), STOPPED, "begins", "\nCalling tools: x"),
        (said("Thought: stop"), STOPPED, "foreign", ""),
        (said("anything"), reply(""), "foreign", ""),
        (said(""), reply(""), "same", ""),
    ],
)  # fmt: skip
def test_a_message_is_what_was_sampled_or_begins_with_it_or_is_foreign(
    message: ChatMessage, sampled: Reply, grade: str, rest: str
) -> None:
    assert compared(message, sampled) == (grade, rest)


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ('{"a": 1, "b": [1.0, 2]}', '{"b":[1,2.0],"a":1}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": "1"}', '{"a": 1}', False),
        ("", "{}", True),
        ("{broken", "{broken", True),
        ('{"a": 1e400}', '{"a": 1e400}', True),
    ],
)
def test_arguments_are_compared_by_value(first: str, second: str, equal: bool) -> None:
    assert (same_json(first) == same_json(second)) is equal


# -- walks ------------------------------------------------------------------------------------------------------------
def test_a_conversation_goes_on_from_its_last_answer() -> None:
    forest = ConversationTree()
    first = answered(forest, [ASK], THOUGHT)
    result = ChatMessage(role="tool", content="84", call_id="a")
    walk = forest.walk([ASK, THOUGHT.message(), result], tools="")
    assert (walk.known, list(walk.tail), walk.foreign) == (first, [result], ())
    second = answered(forest, [ASK, THOUGHT.message(), result], reply("It is 84."))
    assert (second.parent, second.opening) == (first, first.opening)


def test_a_rewritten_answer_starts_a_segment_and_is_told_once() -> None:
    forest = ConversationTree()
    answered(forest, [ASK], THOUGHT)
    rewritten = [ASK, said("I called a tool."), user("Observation: 84")]
    walk = forest.walk(rewritten, tools="")
    assert walk.known is None and [message.content for message in walk.foreign] == ["I called a tool."]
    assert list(walk.tail) == rewritten
    second = answered(forest, rewritten, reply("It is 84."))
    assert second.parent is None and second.opening == 1
    after = forest.walk([*rewritten, said("It is 84."), user("sure?")], tools="")
    assert after.known is second and not after.foreign and [message.content for message in after.tail] == ["sure?"]


def test_an_answer_before_a_rewritten_one_is_the_nearest_but_is_not_gone_on_from() -> None:
    forest = ConversationTree()
    first = answered(forest, [ASK], reply("one"))
    answered(forest, [ASK, said("one"), user("and?")], reply("two"))
    walk = forest.walk([ASK, said("one"), user("and?"), said("2"), user("more")], tools="")
    assert walk.known is None and walk.nearest is first


def test_an_example_in_the_opening_is_no_foreign_answer() -> None:
    forest = ConversationTree()
    walk = forest.walk([user("1+1"), said("2"), ASK], tools="")
    assert walk.known is None and not walk.foreign


def test_a_cut_history_is_a_branch_from_what_is_left() -> None:
    forest = ConversationTree()
    first = answered(forest, [ASK], reply("one"))
    second = answered(forest, [ASK, said("one"), user("and?")], reply("two"))
    changed = forest.walk([ASK, said("one"), user("and now?")], tools="")
    assert changed.known is first and second.parent is first
    dropped = forest.walk([ASK, user("and?")], tools="")
    assert dropped.known is None and dropped.nearest is None


def test_other_tools_are_another_conversation() -> None:
    forest = ConversationTree()
    answered(forest, [ASK], reply("one"), tools="a")
    assert forest.walk([ASK, said("one"), user("and?")], tools="b").known is None


def test_the_newest_of_equal_answers_counts() -> None:
    forest = ConversationTree()
    answered(forest, [ASK], reply("one"))
    newest = answered(forest, [ASK], reply("one"))
    assert forest.walk([ASK, said("one"), user("and?")], tools="").known is newest


def test_text_behind_an_answer_belongs_to_the_way() -> None:
    forest = ConversationTree()
    first = answered(forest, [ASK], STOPPED)
    noted = [ASK, said(STOPPED.full + " noted"), user("Observation: 1")]
    walk = forest.walk(noted, tools="")
    assert (walk.known, walk.rest, [message.content for message in walk.tail]) == (first, " noted", ["Observation: 1"])
    second = answered(forest, noted, reply("done"))
    plain = forest.walk([ASK, said(STOPPED.full), user("Observation: 1")], tools="")
    assert plain.place is not forest.walk(noted, tools="").place and second.parent is first


# -- repeated requests ------------------------------------------------------------------------------------------------
def ask(forest: ConversationTree) -> tuple[TreePosition, TreeAnswer]:
    walk = forest.walk([ASK], tools="")
    return walk, forest.ask(walk, kind=("stop",), prompt_ids=[1], whole=True)


def test_equal_requests_are_two_answers_unless_one_is_repeated() -> None:
    forest = ConversationTree()
    walk, first = ask(forest)
    assert forest.repeated(walk, kind=("stop",), asked_again=False) is None
    assert forest.repeated(walk, kind=("stop",), asked_again=True) is first  # still running
    assert forest.repeated(walk, kind=("other",), asked_again=True) is None
    first.abandoned = True
    assert forest.repeated(walk, kind=("stop",), asked_again=False) is first
    first.reply, first.given, first.abandoned = reply("one"), True, False
    assert forest.repeated(walk, kind=("stop",), asked_again=True) is first  # a retry: the client got no answer
    assert forest.repeated(walk, kind=("stop",), asked_again=False) is None


def test_an_answer_that_nobody_got_is_an_orphan_until_a_conversation_goes_on_from_it() -> None:
    forest = ConversationTree()
    _, first = ask(forest)
    first.reply, first.abandoned = reply("one"), True
    assert forest.orphans() == [first]
    forest.walk([ASK, said("one"), user("and?")], tools="")
    assert forest.orphans() == []


def test_an_answer_that_no_engine_gave_is_forgotten() -> None:
    forest = ConversationTree()
    walk, first = ask(forest)
    forest.withdraw(walk.place, first)
    assert forest.repeated(walk, kind=("stop",), asked_again=True) is None and forest.answers == []


# -- any client -------------------------------------------------------------------------------------------------------
values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-5, 5, width=16) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
objects = st.dictionaries(st.text(max_size=3), values, max_size=3)


def call_texts(value: Any) -> st.SearchStrategy[str]:
    """Returns texts of the same JSON object with different white space and key order."""

    def written(shape: tuple[int | None, bool, bool]) -> str:
        indent, ascii_only, backwards = shape
        ordered = dict(sorted(value.items(), reverse=backwards))
        return json.dumps(ordered, indent=indent, ensure_ascii=ascii_only)

    return st.tuples(st.sampled_from([None, 0, 3]), st.booleans(), st.booleans()).map(written)


@st.composite
def replies(draw: st.DrawFn) -> tuple[Reply, ChatMessage]:
    """Draws a reply, and the form of this message that a client might send back."""
    arguments = draw(st.lists(objects, max_size=2))
    calls, again = [], []
    for number, value in enumerate(arguments):
        name = draw(st.sampled_from(["calc", "look"]))
        calls.append(ChatCall(name=name, arguments=draw(call_texts(value)), id=f"c{number}"))
        again.append(ChatCall(name=name, arguments=draw(call_texts(value)), id=draw(st.text(max_size=3))))
    content, reasoning = draw(st.text(max_size=6)), draw(st.text(max_size=4))
    made_reply = Reply(content=content, full=content + draw(st.sampled_from(["", "STOP"])), reasoning=reasoning,
                calls=tuple(calls))  # fmt: skip
    text = draw(st.sampled_from([content, content.strip(), f" {content}\n", made_reply.full]))
    thought = draw(st.sampled_from([reasoning, "", f"{reasoning}\n"]))
    return made_reply, ChatMessage(role="assistant", content=text, reasoning=thought, calls=tuple(again))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(replies(), st.text(max_size=4)), min_size=1, max_size=5), st.data())
def test_whatever_a_client_makes_of_its_history_each_turn_goes_on_from_the_one_before(
    turns: list[tuple[tuple[Reply, ChatMessage], str]], data: st.DataObject
) -> None:
    forest = ConversationTree()
    history: list[ChatMessage] = [ASK]
    before: TreeAnswer | None = None
    for (made_reply, again), observed in turns:
        walk = forest.walk(history, tools="")
        assert walk.known is before and not walk.foreign
        answer = forest.ask(walk, kind=(), prompt_ids=[], whole=before is None)
        answer.reply, answer.given = made_reply, True
        if before is not None:
            assert answer.parent is before and [m.content for m in walk.tail] == [history[-1].content]
        history += [again, user(observed)]
        before = answer
    assert len(forest.answers) == len(turns) and forest.orphans() == []
    assert {known_answer.opening for known_answer in forest.answers} == {0}
    # Replaces any answer by a foreign answer. Messages after this answer are unknown, and the nearest known answer is
    # the previous answer.
    place = data.draw(st.integers(0, len(turns) - 1))
    history[1 + 2 * place] = said("RelaxForeign")
    walk = forest.walk(history, tools="")
    assert walk.known is None and [m.content for m in walk.foreign] == ["RelaxForeign"]
    assert walk.nearest is (forest.answers[place - 1] if place else None)
