"""Tests that text from a configuration, run, tool or server never becomes a line, code or a special token."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from launchers.local import save_config
from launchers.ray_job.entrypoint import entrypoint, launcher_of
from launchers.ray_job.job_client import submit
from launchers.slurm import sbatch
from relax_core.config.compose import load_config, run
from relax_core.config.errors import ConfigError
from relax_core.config.rerun import is_marked_by_user, key_file, marked, rerun_line
from relax_core.config.saved_config import plain
from relax_core.config.schema import RelaxConfig
from relax_core.config.validate import line_problems, problems_of
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.data.turn_tokens import TurnTokens
from tests.data.chat_templates import FAMILIES, Family, write_folder

# -- lines ------------------------------------------------------------------------------------------------------------
EVIL = ("a\n#SBATCH --wrap=evil", "a\rb", "a\x1b[2Jb", "a\u2028b", "a\u202eb", "a\x85b", "a\tb", "a\x00b")
SLURM = ("launcher=slurm",)
# Programs receive these values unchanged. The values are not written into files of lines.
FREE = ("agent.command", "launcher.env", "rollout.stop")


def text_keys(value: Any, key: str = "") -> Iterator[str]:
    """Yields the keys of all text values of a configuration, except enums."""
    for field in dataclasses.fields(value):
        below, inner = f"{key}{field.name}", getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from text_keys(inner, f"{below}.")
        elif isinstance(inner, str) or (inner is None and "str" in str(field.type)):
            yield below


def set_key(config: Any, key: str, value: Any) -> None:
    *holders, last = key.split(".")
    for name in holders:
        config = getattr(config, name)
    object.__setattr__(config, last, value)


def test_no_text_of_the_configuration_begins_a_line() -> None:
    seen = 0
    for words in (SLURM, ("launcher=ray_job",)):
        clean = load_config(words)
        assert list(line_problems(clean)) == []
        for key in text_keys(clean):
            if key in FREE or (key.split(".")[0] in ("algo", "reward", "env") and not key.endswith("name")):
                continue
            config = copy.deepcopy(clean)
            set_key(config, key, EVIL[seen % len(EVIL)])
            problems = list(line_problems(config))
            assert len(problems) == 1 and problems[0].startswith(f"{key}="), (key, problems)
            assert problems[0].isprintable()
            seen += 1
    assert seen > 60
    with pytest.raises(ConfigError) as caught:
        load_config(["name='a\n#SBATCH --wrap=evil'", "algo.name='\x1b[2J'"])
    assert caught.value.report().replace("\n", "").isprintable()


def test_a_list_and_a_name_begin_no_line() -> None:
    clean = load_config(SLURM)
    for evil in EVIL:
        for key, value in (("eval.sets", {evil: None}), ("launcher.sbatch", [evil]), ("launcher.setup", ["a", evil])):
            config = copy.deepcopy(clean)
            set_key(config, key, value)
            assert any(problem.startswith(key) for problem in problems_of(config)), key


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("name='a b'", "name"),
        ("name=--wrap", "name"),
        ("name='a$(touch x)'", "name"),
        ('launcher.sbatch=["--partition=q\'"]', "launcher.sbatch"),
        ("run.dir=/tmp/%j/x", "run.dir"),
        ('run.dir="/tmp/it\'s"', "run.dir"),
        ('launcher.sbatch=["--wrap=evil"]', "launcher.sbatch"),
        ('launcher.sbatch=["-J"]', "launcher.sbatch"),
        ('launcher.sbatch=["--comment=a\\"b"]', "launcher.sbatch"),
        ('launcher.srun=["touch"]', "launcher.srun"),
        ('launcher.python="a \'b"', "launcher.python"),
        ("launcher.python=--x", "launcher.python"),
    ],
)
def test_slurm_reads_no_value_as_an_option(word: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(["launcher=slurm", word])
    assert any(problem.startswith((f"{key}=", f"{key} ")) for problem in caught.value.problems), caught.value


def test_a_shell_reads_words_of_the_configuration_as_words(tmp_path: Path) -> None:
    """The batch script runs in bash with a fake srun. The entrypoint of a Ray job runs in sh."""
    made, seen = tmp_path / "pwned", tmp_path / "seen"
    python = f"/bin/true ; touch {made} ; $(touch {made}) `touch {made}` && touch {made}"
    (tmp_path / "srun").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {seen}\n')
    (tmp_path / "srun").chmod(0o755)
    config = load_config([*SLURM, f"run.dir={tmp_path}/run"])
    set_key(config, "launcher.python", python)
    set_key(config, "launcher.srun", [f"--x=;touch {made}"])
    text = sbatch.script(config, tmp_path / "files", jobs=1)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash"], input=text, text=True, env=environment, check=True, timeout=20)
    assert {";", "/bin/true", "&&"} <= set(seen.read_text().splitlines()) and not made.exists()
    job = load_config(["launcher=ray_job"])
    set_key(job, "launcher.python", python)
    subprocess.run(["sh", "-c", entrypoint(launcher_of(job))], check=True, timeout=20)
    assert not made.exists()


# -- foreign runs -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    values: dict[str, Any] = plain(load_config([]))
    return values


@pytest.fixture
def saved(base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a run's folder with changed values. Only with ``own`` the folder has this user's mark."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("RELAX_TEST_SECRET", "s3cret-of-mine")

    def make(changes: dict[str, Any], *, own: bool = False) -> Path:
        values = copy.deepcopy(base)
        for key, value in changes.items():
            *holders, last = key.split(".")
            holder = values
            for name in holders:
                holder = holder[name]
            holder[last] = value
        text = yaml.safe_dump(values, sort_keys=False)
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "config.yaml").write_text(marked(text) if own else text)
        return tmp_path / "run"

    return make


def repeated(*words: str) -> list[RelaxConfig]:
    found: list[RelaxConfig] = []

    def job(config: RelaxConfig) -> int:
        found.append(config)
        return 0

    return found if run(rerun_line(words), job) == 0 else []


def test_an_own_run_needs_no_trust_wherever_it_lies(saved: Callable[..., Path], tmp_path: Path) -> None:
    config = load_config(["agent.env.A=${oc.env:RELAX_TEST_SECRET}"])
    (tmp_path / "elsewhere").mkdir()
    file = save_config(config, tmp_path / "elsewhere")
    assert is_marked_by_user(file.read_text()) and key_file().stat().st_mode & 0o777 == 0o600
    rerun_line([str(tmp_path / "elsewhere")])
    file.write_text(file.read_text().replace("seed: 0", "seed: 1"))
    with pytest.raises(ConfigError, match="--trust"):
        rerun_line([str(tmp_path / "elsewhere")])
    key_file().chmod(0o644)
    file.write_text(marked("seed: 1\n"))
    assert not is_marked_by_user(file.read_text()), "a key that others can read is not valid"


def test_a_foreign_run_of_plain_values_needs_no_trust(saved: Callable[..., Path]) -> None:
    assert repeated(str(saved({"seed": 7})))[0].seed == 7


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("algo.name", "/tmp/evil.py"),
        ("reward.name", "evil.py"),
        ("env.name", "/tmp/evil.py"),
        ("engine.name", "/tmp/evil.py"),
        ("data.name", "/tmp/evil.py"),
        ("model.family", "/tmp/evil.py"),
        ("tracker.sinks", ["/tmp/evil.py"]),
        ("tracker.sinks", {"/tmp/evil.py": {"a": 1}}),
        ("tracker.sinks", {"otlp": {"endpoint": "http://evil.example/x"}}),
        ("agent.command", "sh -c evil"),
        ("agent.python", "/tmp/evil"),
        ("agent.env", {"A": "${oc.env:RELAX_TEST_SECRET}"}),
        ("engine.python", "/tmp/evil"),
        ("engine.flags", {"trust-remote-code": True}),
        ("engine.token_file", "/root/.ssh/id"),
        ("engine.urls", ["http://evil.example:1"]),
        ("engine.elastic.allowed_hosts", ["evil.example"]),
        ("notify.urls_file", "/tmp/evil"),
        ("endpoint.host", "0.0.0.0"),
    ],
)
def test_a_foreign_run_with_powers_needs_trust(saved: Callable[..., Path], key: str, value: Any) -> None:
    folder = saved({key: value})
    with pytest.raises(ConfigError) as caught:
        rerun_line([str(folder)])
    assert key in str(caught.value) and "--trust" in str(caught.value) and "s3cret" not in str(caught.value)
    rerun_line([str(folder), "--trust"])
    rerun_line([str(saved({key: value}, own=True))])


def test_a_foreign_runs_texts_are_not_resolved(saved: Callable[..., Path]) -> None:
    secret = "${oc.env:RELAX_TEST_SECRET}"
    (config,) = repeated(str(saved({"name": f"x-{secret}", "rollout.stop": [secret, "\\" + secret]})), "--trust")
    assert config.name == f"x-{secret}" and config.rollout.stop == [secret, "\\" + secret]
    assert "s3cret" not in config.run.dir


@pytest.mark.parametrize("key", ["hydra", "defaults", "_target_"])
def test_a_saved_run_sets_nothing_of_hydra(saved: Callable[..., Path], tmp_path: Path, key: str) -> None:
    target = {"_target_": "subprocess.run", "args": ["touch", str(tmp_path / "pwned")], "metric": "x"}
    folder = saved({key: {"launcher": target, "sweeper": target, "searchpath": ["file:///tmp"]}}, own=True)
    with pytest.raises(ConfigError, match=key):
        rerun_line([str(folder), "--trust", "-m", "seed=1,2"])
    assert not (tmp_path / "pwned").exists()


def test_export_runs_no_family_of_a_foreign_run(saved: Callable[..., Path], tmp_path: Path) -> None:
    from relax_core.tools import export

    folder = saved({"model.family": str(tmp_path / "evil.py")})
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')\n")
    (folder / "meta.json").write_text(json.dumps({"step": 1}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export.CheckpointStore, "verify", lambda *arguments, **options: None)
        with pytest.raises(ValueError, match=r"model\.family"):
            export.export(folder, tmp_path / "out", model=None, dtype=None, shard_gb=1.0, trust=False)
    assert not (tmp_path / "pwned").exists()


class _Touches:
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.made}",))


def test_the_index_of_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    from relax_core.train.checkpoints.checkpoint_shards import StoredFolder, read_errors_as_valueerror

    made = tmp_path / "pwned"
    elsewhere = {MetadataIndex("a"): _StorageInfo("../../etc/passwd", 0, 9)}
    outside = Metadata(state_dict_metadata={}, storage_data=elsewhere)
    hidden = Metadata(state_dict_metadata={}, planner_data=_Touches(made))
    for evil in (_Touches(made), hidden, outside, [1], {"a": _Touches(made)}):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(evil))
        with pytest.raises(ValueError, match="cannot be read"), read_errors_as_valueerror(tmp_path):
            StoredFolder(tmp_path)
        assert not made.exists()


# -- special tokens ---------------------------------------------------------------------------------------------------
# Qwen's newer templates write the keys of a tool's schema and of a call's arguments as tags.
XML_KEYS = """{%- macro tags(values) %}{%- for key, value in values | items %}{{ '\\n<' ~ key ~ '>' }}
{%- if value is mapping %}{{ tags(value) }}{%- else %}{{ value }}{%- endif %}{{ '</' ~ key ~ '>' }}
{%- endfor %}{%- endmacro %}
{%- if tools %}<|im_start|>system{%- for tool in tools %}{{ tags(tool.function) }}{% endfor %}<|im_end|>{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{ m.content | trim }}{%- else %}{%- for part in m.content %}{{ part.text }}{%- endfor %}
{%- endif %}{%- for call in m.tool_calls or [] %}{{ '<' ~ call.id ~ '>' ~ call.function.name }}
{{- tags(call.function.arguments) }}{%- endfor %}{{ m.name }}{{ m.tool_call_id }}{{ '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
ALL = {**FAMILIES, "xml_keys": Family(XML_KEYS, ("<|im_start|>", "<|im_end|>", "<s>", "</s>"), ("<|im_end|>",))}
HARMLESS = "xyz1"


def texts(special: tuple[str, ...]) -> list[str]:
    """Returns names of special tokens, and parts that become a special token next to other text."""
    found = []
    for name in (special[0], special[-1], special[len(special) // 2]):
        found += [name, f"a{name}b", name + name, name[1:-1], name[1:], name[:-1], name[:4], name[4:], f" {name[:3]} "]
    return list(dict.fromkeys(text for text in found if text.strip()))


def conversation(evil: str, other: str, *, as_text: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns messages and tools with these texts in every field that a third party can fill."""
    arguments: Any = {evil: other, "b": {other: [evil, {evil: evil}]}}
    arguments = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    schema = {"type": "object", "properties": {evil: {"type": evil, "enum": [evil, other], "title": other}}, evil: evil}
    function = {"name": evil, "description": other, "parameters": {**schema, "required": [evil]}}
    call = {"id": evil, "type": "function", "function": {"name": evil, "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": evil},
        {"role": "user", "content": f"{evil}{other}"},
        {"role": "assistant", "content": evil, "reasoning_content": other, "tool_calls": [call]},
        {"role": "tool", "name": evil, "tool_call_id": evil, "content": f"{other}\n{evil}"},
    ]
    return messages, [{"type": "function", "function": function}]


def special_ids(tokenizer: PromptTokenizer, ids: list[int]) -> list[int]:
    return [token for token in ids if tokenizer.is_special(token)]


@pytest.mark.parametrize("name", ALL)
def test_no_text_of_others_becomes_a_special_token(name: str, tmp_path: Path) -> None:
    family = ALL[name]
    tokenizer = PromptTokenizer(write_folder(tmp_path, family))
    rendered = 0
    for as_text in (False, True):
        messages, tools = conversation(HARMLESS, HARMLESS, as_text=as_text)
        for shorten in (4, 2):  # some templates do not support calls
            try:
                expected = special_ids(tokenizer, tokenizer.encode(messages[:shorten], tools=tools))
            except ValueError:
                continue
            evils = texts(family.special)
            for number, evil in enumerate(evils):
                attack, evil_tools = conversation(evil, evils[number - 1], as_text=as_text)
                ids = tokenizer.encode(attack[:shorten], tools=evil_tools)
                assert special_ids(tokenizer, ids) == expected, (evil, tokenizer.decode(ids))
                assert evil.strip() in tokenizer.decode(ids), "the text itself is kept"
                rendered += 1
    assert rendered > 20


def test_no_later_message_becomes_a_special_token(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(write_folder(tmp_path, ALL["xml_keys"]))
    for evil in texts(ALL["xml_keys"].special):
        counts = []
        for text in (HARMLESS, evil):
            messages, tools = conversation(text, text, as_text=False)
            turns = TurnTokens(tokenizer, messages[:2], tools=tools)
            ids, _ = turns.next_prompt([1], [tokenizer.stop_token_ids[0]], [{"role": "user", "content": text}])
            counts.append(special_ids(tokenizer, ids))
        assert counts[0] == counts[1], evil


def test_parts_of_a_message_join_to_no_special_token(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(write_folder(tmp_path, ALL["xml_keys"]))
    for parts in (["<|im_", "end|>"], ["<", "|im_end|", ">"], ["a<|im_e", "nd", "|>b"], ["<|im_end", "|> "]):
        content = [{"type": "text", "text": part} for part in parts]
        ids = tokenizer.encode([{"role": "user", "content": content}])
        assert len(special_ids(tokenizer, ids)) == 3, parts  # the user's turn, and the next answer
        assert "".join(parts).strip() in tokenizer.decode(ids)


def test_harmless_text_has_the_tokens_of_the_whole_text(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(write_folder(tmp_path, ALL["strips_thinking"]))
    for text in ("<", ">", "im_end", "a < b > c |", "<|", "|>", "start", " <|im ", "ü<"):
        messages = [{"role": "user", "content": text}]
        assert tokenizer.encode(messages) == tokenizer.encode_text(tokenizer.render(messages)), text


# -- redirects --------------------------------------------------------------------------------------------------------
@pytest.fixture
def servers() -> Iterator[tuple[str, list[str]]]:
    """Yields the address of a server that redirects to a second server, and the second server's list of requests."""
    asked: list[str] = []

    class Other(BaseHTTPRequestHandler):
        def answer(self) -> None:
            asked.append(f"{self.path} {self.headers.get('Authorization')}")
            self.send_response(200)
            self.send_header("Content-Length", "1")
            self.end_headers()
            self.wfile.write(b"1")

        do_GET = do_POST = do_PUT = answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    second = ThreadingHTTPServer(("127.0.0.1", 0), Other)

    class First(Other):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{second.server_address[1]}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST = do_PUT = answer

    first = ThreadingHTTPServer(("127.0.0.1", 0), First)
    for server in (first, second):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{first.server_address[1]}", asked
    for server in (first, second):
        server.shutdown()
        server.server_close()


def test_no_client_with_a_key_follows_a_redirect(
    servers: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    from envs.openenv import OpenEnvConfig, _schema
    from relax_core.contracts.judge import JudgeConfig
    from relax_core.contracts.reward import RewardInput, RewardUnusable
    from relax_core.rollout.judges.judge_servers import JudgeRefused, JudgeUrl
    from rewards.remote import RemoteConfig, score

    url, asked = servers
    monkeypatch.setenv("RELAX_TEST_TOKEN", "t0ken-of-mine")
    token_file = tmp_path / "token"
    token_file.write_text("t0ken-of-mine")
    token_file.chmod(0o600)
    given = RewardInput(response="a", stopped=True, answer="b", row={"prompt": "p"})
    with pytest.raises(RewardUnusable, match=r"reward\.url=.*302"):
        asyncio.run(score(given, RemoteConfig(url=f"{url}/score", token_env="RELAX_TEST_TOKEN")))
    judge = JudgeUrl(JudgeConfig(url=url, model="m", token_file=str(token_file)))
    with pytest.raises(JudgeRefused, match="302"):
        asyncio.run(judge.answer("q", seed=0, temperature=0.0))
    with pytest.raises(ValueError, match=r"env\.url"):
        _schema(OpenEnvConfig(url=url))
    job = load_config(["launcher=ray_job", f"launcher.address={url}", f"launcher.token_file={token_file}"])
    with pytest.raises(ConnectionError):
        submit(job, [])
    assert asked == []
