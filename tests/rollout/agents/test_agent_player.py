"""Tests episodes that real agent processes play, from the task to the account of every token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts.env import EpisodeLimits
from relax_core.contracts.reward import RewardOutput
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.rollout.agent_processes.one_shot_agents import OneShotAgentRunner
from relax_core.rollout.agents.agent_session import AgentSession, SessionTable
from relax_core.rollout.agents.endpoint_app import API_PROTOCOLS
from relax_core.rollout.episodes.episode_records import EpisodeRecord
from relax_core.rollout.episodes.group_assembly import build_tree, token_accounts
from relax_core.rollout.episodes.group_player import EarlyEnds
from tests.data.chat_templates import FAMILIES, write_folder
from tests.rollout.agents.agent_harness import CONTEXT, AnsweringPool, Played, agent_settings, played, python_agent


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    return PromptTokenizer(write_folder(tmp_path_factory.mktemp("m") / "model", FAMILIES["strips_thinking"]))


def runs(tmp_path: Path, body: str) -> Any:
    command = python_agent(tmp_path, body)
    return lambda agent: OneShotAgentRunner(command, agent, folder=tmp_path / "agents")


def accounts(found: Played, *records: EpisodeRecord) -> dict[str, int]:
    """Returns the accounts of all tokens from the engines. Each episode with turns must have a reward."""
    own = records or tuple(found.records)
    for account in own:
        account.output = RewardOutput(reward=None if account.failed else 1.0)
    kept = [account for account in own if account.reward is not None]
    counts = token_accounts(own, build_tree("g", kept) if kept else None)
    assert counts["sampled"] == found.pool.sampled
    return counts


def test_an_agent_plays_an_episode_of_two_turns(tokenizer: PromptTokenizer, tmp_path: Path) -> None:
    """The agent receives task, key and names, sends two requests in one conversation, and returns a result."""
    body = """
row = json.load(open(os.environ["RELAX_TASK"]))
assert row == {"prompt": "2+2", "answer": "4", "level": 7}, row
assert os.environ["RELAX_UID"] == "g00000003.0" and os.environ["RELAX_ATTEMPT"] == "0"
assert os.environ["ANTHROPIC_API_KEY"] == os.environ["OPENAI_API_KEY"]
assert os.environ["OPENAI_BASE_URL"] == os.environ["ANTHROPIC_BASE_URL"] + "/v1"
first = ask("2+2 ?")
result(reward=0.25, metrics={"asked": 2}, said=ask("2+2 ?", first, "sure ?"))
"""
    found = played(tokenizer, runs(tmp_path, body), row={"prompt": "2+2", "answer": "4", "level": 7})
    record = found.one
    assert (record.ended, record.own_reward, record.info["asked"], record.failed) == ("env_done", 0.25, [2.0], "")
    assert len(record.turns) == 2 and record.counts["requests"] == 2 and record.counts["segments"] == 1
    assert accounts(found)["trained"] == found.pool.sampled
    assert not (tmp_path / "agents").exists()
    assert len({request.rid for request in found.pool.requests}) == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print('no model'); sys.exit(3)", "exit code 3; the last that it wrote: no model"),
        ("ask('a'); raise ValueError('bad tool')", "ValueError: bad tool"),
        ("print('bye')", "the agent took no answer of the model; the last that it wrote: bye"),
        ("ask('a'); result(reward='much')", "reward='much': give a finite number"),
        ("ask('a'); result(reward=float('nan'))", "RELAX_RESULT"),
        ("ask('a'); result(metrics={'x': 'y'})", "metrics={'x': 'y'}: give names with finite numbers"),
        ("ask('a'); open(os.environ['RELAX_RESULT'], 'w').write('[1]')", "it is not a JSON object"),
        ("ask('a'); os.symlink('/dev/zero', os.environ['RELAX_RESULT'])", "RELAX_RESULT: "),
        ("ask('a'); os.mkfifo(os.environ['RELAX_RESULT'])", "it is not a plain file"),
        ("ask('a'); result(error='no docker')", "the agent says: no docker"),
    ],
)
def test_an_agent_that_fails_has_no_reward(tokenizer: PromptTokenizer, tmp_path: Path, body: str, message: str) -> None:
    record = played(tokenizer, runs(tmp_path, body)).one
    assert record.ended == "env_failed" and message in record.failed and record.own_reward is None


def test_a_failed_attempt_starts_again_with_another_key(tokenizer: PromptTokenizer, tmp_path: Path) -> None:
    """The old key gets 410 on every route. Tokens of the first attempt are sampled, but not chosen."""
    body = f"""
answer = ask("hello")
if os.environ["RELAX_ATTEMPT"] == "0":
    open({str(tmp_path / "key")!r}, "w").write(os.environ["OPENAI_API_KEY"])
    sys.exit(1)
os.environ["OPENAI_API_KEY"] = open({str(tmp_path / "key")!r}).read()
for path in {[path.removeprefix("/v1") for path in API_PROTOCOLS]!r}:
    try:
        post({{}}, path)
    except urllib.error.HTTPError as error:
        assert error.code == 410, error
    else:
        raise AssertionError(path)
"""
    found = played(tokenizer, runs(tmp_path, body), max_retries=1)
    record = found.one
    assert (record.ended, record.restarts, record.failed) == ("env_done", 1, ""), record.failed
    assert [request.rid for request in found.pool.requests] == ["r.0.0", "r.0.0.1"]
    counts = accounts(found)
    assert counts["trained"] == counts["not_chosen"] == found.pool.sampled // 2


def test_an_agent_that_hangs_ends_by_its_time(tokenizer: PromptTokenizer, tmp_path: Path) -> None:
    settings = agent_settings(timeout_s=6.0)  # on a loaded machine a process needs seconds to start and send a request
    found = played(tokenizer, runs(tmp_path, "ask('a'); time.sleep(600)"), agent=settings, max_retries=3)
    assert found.one.ended == "episode_timeout" and "agent.timeout_s=6" in found.one.failed
    assert accounts(found)["no_reward"] == found.pool.sampled > 0


def test_a_limit_ends_an_episode_with_a_reward_whatever_the_agent_does_then(
    tokenizer: PromptTokenizer, tmp_path: Path
) -> None:
    """The agent's next request gets 410, and the agent dies. An agent that catches the error may return a result."""
    limits = EpisodeLimits(turns=2, sampled_tokens=CONTEXT, context_tokens=CONTEXT)
    body = "for number in range(9): ask(str(number))"
    record = played(tokenizer, runs(tmp_path, body), limits=limits).one
    assert (record.ended, record.failed, len(record.turns), record.own_reward) == ("max_turns", "", 2, None)
    body = """
try:
    for number in range(9): ask(str(number))
except urllib.error.HTTPError as error:
    assert error.code == 410
    result(reward=number)
"""
    record = played(tokenizer, runs(tmp_path, body), limits=limits).one
    assert (record.ended, record.failed, record.own_reward) == ("max_turns", "", 2.0)
    body = """
try:
    for number in range(9): ask(str(number))
except urllib.error.HTTPError:
    time.sleep(600)
"""
    record = played(tokenizer, runs(tmp_path, body), limits=limits).one
    assert (record.ended, record.failed, len(record.turns)) == ("max_turns", "", 2)


def test_a_group_that_is_given_up_leaves_no_agent_and_no_request(tokenizer: PromptTokenizer, tmp_path: Path) -> None:
    """Running requests are cancelled, and every token is in an account."""

    async def beside(agent_harness: asyncio.Task[Any], pool: AnsweringPool) -> None:
        while len(pool.requests) < 4:
            await asyncio.sleep(0.01)
        agent_harness.cancel()

    runner = runs(tmp_path, "ask('a'); ask('HANG')")
    found = played(tokenizer, runner, lambda text: "HANG" if "HANG" in text else "yes", episodes=2, beside=beside)
    assert not found.records and {record.ended for record in found.cancelled} == {"cancelled"}
    assert sorted(found.pool.cancelled) == ["r.0.1", "r.1.1"]
    assert accounts(found, *found.cancelled)["dropped"] == found.pool.sampled > 0
    assert not (tmp_path / "agents").exists()


class SeenSessions(SessionTable):
    """Exposes the newest session to the test. Session and test run in one event loop."""

    session: AgentSession

    def open(self, session: AgentSession) -> str:
        self.session = session
        return super().open(session)


def test_requests_at_one_time_and_clients_that_hang_up(tokenizer: PromptTokenizer, tmp_path: Path) -> None:
    """A helper's conversation is a separate segment. After a client hangs up, a repeated request gets the answer;
    without such a request the answer is an orphan. Each token is in one account.
    """
    body = f"""
import pathlib, socket, threading
folder = pathlib.Path({str(tmp_path)!r})

def hang_up(text):
    host, port = os.environ["ANTHROPIC_BASE_URL"].removeprefix("http://").split(":")
    body = json.dumps({{"messages": [{{"role": "user", "content": text}}]}})
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Authorization: Bearer " + os.environ["OPENAI_API_KEY"]]
    lines += [f"Content-Length: {{len(body)}}", "", body]
    with socket.create_connection((host, int(port)), timeout=60) as one:
        one.sendall((chr(13) + chr(10)).join(lines).encode())
        while not (folder / f"the engine has {{text}}").exists():
            time.sleep(0.01)
        one.shutdown(socket.SHUT_WR)
        assert one.recv(1) == b"", "the endpoint closes its side, so it has seen that this side is closed"

threads = [threading.Thread(target=ask, args=[text]) for text in ("main", "helper")]
[one.start() for one in threads]
[one.join() for one in threads]
hang_up("asked again")
assert ask("asked again") == "yes"
hang_up("left alone")
(folder / "hung up").touch()
assert ask("main", "yes", "and on") == "yes"
"""
    sessions = SeenSessions(most=1)

    def holds(text: str) -> bool:
        """Returns whether to delay the response to a prompt. Main and helper requests are not delayed."""
        for held, over in {
            "asked again": lambda: sessions.session.counts["repeated"],
            "left alone": (tmp_path / "hung up").exists,
            "and on": lambda: len(sessions.session.under_way) == 1,  # the abandoned request has ended
        }.items():
            if held in text:
                (tmp_path / f"the engine has {held}").touch()
                return not over()
        return False

    found = played(tokenizer, runs(tmp_path, body), holds=holds, sessions=sessions)
    record = found.one
    assert record.failed == "" and record.ended == "env_done"
    counts = accounts(found)
    assert (len(record.turns), record.counts["segments"], record.counts["repeated"]) == (4, 3, 1)
    assert counts["trained"] == 4 * counts["orphan"] > 0


def test_stragglers_end_with_their_agents(tokenizer: PromptTokenizer, tmp_path: Path) -> None:
    body = f"""
ask('a')
straggles = {str(tmp_path / "straggles")!r}
if os.environ["RELAX_UID"].endswith(".1"):
    open(straggles, "w").close()
    time.sleep(600)
while not os.path.exists(straggles):
    time.sleep(0.01)
"""
    found = played(tokenizer, runs(tmp_path, body), episodes=2, ends=EarlyEnds(quorum=0.5))
    assert [record.ended for record in found.records] == ["env_done", "straggler"]
    assert accounts(found)["sampled"] == found.pool.sampled


def test_an_episode_that_is_too_old_ends_at_its_next_request(tokenizer: PromptTokenizer, tmp_path: Path) -> None:
    body = "for number in range(9): ask(str(number))"
    record = played(tokenizer, runs(tmp_path, body), ages=True, ends=EarlyEnds(max_lag=1)).one
    assert (record.ended, len(record.turns)) == ("stale", 3) and "have version 1, and" in record.failed


def test_the_first_three_failures_are_told_whole(
    tokenizer: PromptTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At most the configured number of agents plays at the same time."""
    body = f"""
running = {str(tmp_path)!r} + "/running"
assert not os.path.exists(running)
open(running, "w").close()
print("x" * 3000)
os.remove(running)
sys.exit(1)
"""
    found = played(tokenizer, runs(tmp_path, body), episodes=4, at_once=1)
    assert {record.ended for record in found.records} == {"env_failed"}
    assert all("exit code 1" in record.failed and len(record.failed) < 2500 for record in found.records), found.records
    told = [text.getMessage() for text in caplog.records if "All that its agent wrote" in text.getMessage()]
    assert len(told) == 3 and all("x" * 3000 in text for text in told)
