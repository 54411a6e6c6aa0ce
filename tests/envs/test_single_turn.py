from __future__ import annotations

from envs.single_turn import SPEC, SingleTurnConfig


def test_text_becomes_one_user_message() -> None:
    row = {"prompt": "rev 12345", "answer": "54321"}
    assert SPEC.messages(row, SingleTurnConfig()) == [{"role": "user", "content": "rev 12345"}]


def test_messages_pass_unchanged() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}]
    assert SPEC.messages({"prompt": messages, "answer": "2"}, SingleTurnConfig()) == messages
