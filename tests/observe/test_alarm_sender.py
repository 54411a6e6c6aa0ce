"""Tests messages to real HTTP and SMTP receivers. A bad, hanging or dead receiver is named and delays no other."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_core.observe.alarms import MAX_WAITING, AlarmSender, main, read_receivers
from tests.observe.receivers import DEADLINE_S, Message, http_receiver, smtp_receiver
from tests.ports import free_port

KNOWN = "what is known"


def urls_file(folder: Path, *addresses: str, mode: int = 0o600) -> Path:
    file = folder / "urls"
    file.write_text("# those who are told\n\n" + "\n".join(addresses) + "\n")
    file.chmod(mode)
    return file


@pytest.fixture
def http() -> Iterator[Message]:
    with http_receiver() as told:
        yield told


def test_a_message_reaches_http_and_mail(tmp_path: Path, http: Message) -> None:
    with smtp_receiver() as mail:
        file = urls_file(
            tmp_path,
            f"json://127.0.0.1:{http.port}/told",
            f"mailto://127.0.0.1:{mail.port}/?from=relax@example.com&to=me@example.com&mode=insecure",
        )
        lines: list[str] = []
        receivers = read_receivers(file)
        assert [name for name, _ in receivers] == ["json 127.0.0.1", "mailto 127.0.0.1"]
        sender = AlarmSender(receivers, lines.append)
        sender.put("the reward is gone", KNOWN)
        sender.close(timeout_s=DEADLINE_S)
        assert http.messages == [("the reward is gone", "what is known")]
        ((subject, text),) = mail.messages
        assert subject == "the reward is gone" and "what is known" in text
        assert lines == []


def test_a_refused_message_is_sent_again_and_then_told_in_the_log(tmp_path: Path, http: Message) -> None:
    http.refusals = 2
    lines: list[str] = []
    receivers = read_receivers(urls_file(tmp_path, f"json://me:a-secret@127.0.0.1:{http.port}"))
    sender = AlarmSender(receivers, lines.append, pauses_s=(0.0, 0.0))
    sender.put("third time lucky", KNOWN)
    http.wait(1)
    http.refusals = 3
    sender.put("not taken", KNOWN)
    sender.close(timeout_s=DEADLINE_S)
    assert [title for title, _ in http.messages] == ["third time lucky"]
    assert len(lines) == 1 and "json 127.0.0.1 did not accept 'not taken' in 3 tries" in lines[0]
    assert "a-secret" not in lines[0]


def test_one_that_never_answers_and_a_dead_one_delay_nobody(tmp_path: Path, http: Message) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = [
            f"json://127.0.0.1:{silent.getsockname()[1]}",
            f"json://127.0.0.1:{free_port()}",
            f"json://127.0.0.1:{http.port}",
        ]
        lines: list[str] = []
        sender = AlarmSender(
            read_receivers(urls_file(tmp_path, *addresses)), lines.append, try_s=1.0, pauses_s=(0.0, 0.0)
        )
        began = time.monotonic()
        sender.put("first", KNOWN)
        sender.put("second", KNOWN)
        put_s = time.monotonic() - began
        assert [title for title, _ in http.wait(2)] == ["first", "second"]
        sender.close(timeout_s=DEADLINE_S)
    assert put_s < 1.0, "a caller waited for a receiver"
    assert sum("no answer within 1 s" in line for line in lines) == 2
    assert sum("the receiver refused the message or did not answer" in line for line in lines) == 2


def test_a_thousand_messages_are_few(http: Message, tmp_path: Path) -> None:
    sender = AlarmSender(read_receivers(urls_file(tmp_path, f"json://127.0.0.1:{http.port}")), lambda line: None)
    for number in range(1000):
        sender.put(f"message {number}", KNOWN)
    sender.close(timeout_s=DEADLINE_S)
    assert 1 <= len(http.messages) <= 1000 // MAX_WAITING
    assert http.messages[-1][0].endswith("more")


def test_what_waits_at_the_end_is_named() -> None:
    lines: list[str] = []
    sender = AlarmSender([("slow one", lambda title, text: bool(time.sleep(0.5)))], lines.append, try_s=10.0)
    sender.put("the last words", KNOWN)
    sender.close(timeout_s=0.01)
    assert lines == ["notify: slow one did not get these messages: 'the last words'"]


def test_a_message_from_a_process_of_its_own(
    tmp_path: Path, http: Message, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([str(urls_file(tmp_path, f"json://127.0.0.1:{http.port}")), "failed", "the controller died"]) == 0
    assert http.messages == [("failed", "the controller died")]


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        (["json://127.0.0.1", "nosuch://secret-host"], "line 4"),
        (["just words and a secret-host"], "line 3"),
        ([], "has no address"),
    ],
)
def test_a_wrong_file_is_refused_without_its_addresses(tmp_path: Path, addresses: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=r"notify\.urls_file") as refused:
        read_receivers(urls_file(tmp_path, *addresses))
    assert message in str(refused.value) and "secret-host" not in str(refused.value)


def test_a_file_that_others_can_read_or_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="chmod 600"):
        read_receivers(urls_file(tmp_path, "json://127.0.0.1", mode=0o644))
    with pytest.raises(ValueError, match="cannot be read"):
        read_receivers(tmp_path / "none")
