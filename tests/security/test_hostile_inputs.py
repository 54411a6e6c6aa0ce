"""Tests that hostile data files, model folders, chat templates and messages are refused within limits of time and
memory.

Each case runs the functions that a run calls before its start, in a process with limits of memory and time.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_core.config.choices import Overlong
from relax_core.contracts.data import BadRow
from relax_core.contracts.untrusted_files import open_regular
from relax_core.contracts.untrusted_values import MAX_DEPTH, decode_json
from relax_core.data.data_files import MAX_ROW_BYTES, RowKeys, open_rows
from relax_core.data.tokenizer import PromptTokenizer, TextTooLong
from relax_core.data.tokenizer_trial import try_tokenizer
from relax_core.families.folder import folder_architecture, stored_kinds, weight_files
from relax_core.families.hf_config import end_token_ids, read_hf_config
from relax_core.families.tiny_configs import tiny_config
from relax_core.registry import find_env
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.tools.tiny_text import tiny_prompt_tokenizer, write_prompt_tokenizer

CASE_S = 10.0  # limit of processor time, because other programs may use the cores
CASE_GIB = 3.0  # limit of private memory of the process that reads all data files
FUZZ = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
KEYS = RowKeys(prompt="prompt", answer="answer")
_READ_ALL = """
import json, resource, signal, sys, time
from pathlib import Path
from relax_core.contracts.data import BadRow
from relax_core.data.data_files import RowKeys, open_rows

def late(number, frame):
    raise TimeoutError("too late")

def read(path):
    lines = []
    try:
        rows = open_rows(path, RowKeys(prompt="prompt", answer="answer"))
    except (ValueError, OSError) as error:
        return [f"REFUSED {str(error)[:300].encode()}"]
    for number in range(min(21, len(rows))):
        try:
            rows.modality(number), rows[number]
            lines.append(f"ROW {number}")
        except BadRow as error:
            lines.append(f"BAD {number} {str(error)[:300].encode()}")
    return lines

most = int(float(sys.argv[1]) * (1 << 30))
signal.signal(signal.SIGALRM, late)
signal.signal(signal.SIGPROF, late)
for line in sys.stdin:
    case, path = json.loads(line)
    began = time.process_time()
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[2]))
    signal.alarm(60)  # for what waits
    try:
        lines = read(Path(path))
    except BaseException as error:
        lines = [f"ENDED {type(error).__name__} {str(error)[:300].encode()}"]
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)
    print(json.dumps([case, lines, time.process_time() - began]), flush=True)
"""


def nested(depth: int, *, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + "1" + closing * depth


# -- data -------------------------------------------------------------------------------------------------------------
def dictionary(text: str, count: int) -> pyarrow.Array:
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), pyarrow.array([text]))


def write_parquet(file: Path, columns: dict[str, Any], **options: Any) -> None:
    pyarrow.parquet.write_table(
        pyarrow.table(columns), file, compression="zstd", store_schema=False, **options
    )  # without arrow's schema, a reader does not know that equal texts are stored once


def zeros_in_pages(file: Path) -> None:
    """Writes about 100 KB that expand to 2.7 GB of text, more than a row group may have."""
    block = pyarrow.table({"prompt": pyarrow.array(["\0" * (16 << 20)] * 4), "answer": pyarrow.array(["1"] * 4)})
    with pyarrow.parquet.ParquetWriter(
        file, block.schema, compression="zstd", use_dictionary=False, store_schema=False
    ) as writer:
        writer.write_table(pyarrow.concat_tables([block] * 40), row_group_size=1 << 20)


def repeated_text(file: Path) -> None:
    """Writes 500 bytes that expand to 40 GB of text."""
    count = 40_000
    write_parquet(file, {"prompt": dictionary("x" * 1_000_000, count), "answer": pyarrow.array(["1"] * count)})


def repeated_in_lists(file: Path) -> None:
    """Writes rows with lists that repeat one text. Each list expands to 20 GB."""
    rows, per_row = 10, 1000
    texts = dictionary("y" * 20_000_000, rows * per_row)
    lists = pyarrow.ListArray.from_arrays(pyarrow.array(range(0, rows * per_row + 1, per_row), pyarrow.int32()), texts)
    write_parquet(file, {"prompt": pyarrow.array(["p"] * rows), "answer": pyarrow.array(["1"] * rows), "extra": lists})


def repeated_numbers(file: Path) -> None:
    """Writes one row with 3 million numbers, stored in 500 bytes."""
    count = 3_000_000
    numbers = pyarrow.repeat(pyarrow.scalar(7, pyarrow.int64()), count)
    lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, count], pyarrow.int32()), numbers)
    write_parquet(file, {"prompt": pyarrow.array(["p"]), "answer": pyarrow.array(["1"]), "extra": lists})


def bytes_as_text(file: Path) -> None:
    """Writes texts that are not UTF-8."""
    binary = pyarrow.array([b"\xff\xfe", b"ok"], pyarrow.binary())
    texts = pyarrow.StringArray.from_buffers(2, binary.buffers()[1], binary.buffers()[2])
    write_parquet(file, {"prompt": texts, "answer": pyarrow.array(["1", "2"])})


def sparse(size: int) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        with file.open("wb") as opened:
            opened.truncate(size)

    return write


def text(content: str | bytes) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)

    return write


def socket_file(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = Path.cwd()
        os.chdir(file.parent)  # the name of a socket must be short
        try:
            bound.bind(file.name)
        finally:
            os.chdir(here)


GOOD = '{"prompt": "p", "answer": "a"}\n'
LARGE = "x" * 50_000_000
# name → suffix, writer of the file, and the words that the child must print
DATA: dict[str, tuple[str, Callable[[Path], Any], tuple[str, ...]]] = {
    "deep JSON": (
        "jsonl",
        text(f'{{"prompt": "p", "answer": "a", "x": {nested(100_000)}}}\n{GOOD}'),
        ("BAD 0", "ROW 1"),
    ),
    "JSON that is decoded and is too deep": (
        "jsonl",
        text(f'{{"prompt": "p", "answer": "a", "x": {nested(900)}}}\n{GOOD}'),
        ("BAD 0", "nested", "ROW 1"),
    ),
    "deep objects": ("jsonl", text(nested(500, opening='{"a":', closing="}") + "\n" + GOOD), ("BAD 0", "ROW 1")),
    "row of 50 MB": ("jsonl", text(f'{{"prompt": "{LARGE}", "answer": "a"}}\n{GOOD}'), ("BAD 0", "MB", "ROW 1")),
    "line of 6 GB": ("jsonl", sparse(6 << 30), ("REFUSED", "line")),
    "answer of 5000 digits": ("jsonl", text(f'{{"prompt": "p", "answer": 1{"0" * 5000}}}\n{GOOD}'), ("BAD 0", "ROW 1")),
    "answer of 4000 digits": ("jsonl", text(f'{{"prompt": "p", "answer": 1{"0" * 4000}}}\n{GOOD}'), ("ROW 1",)),
    "integer of 31 digits": ("jsonl", text(f'{{"prompt": "p", "answer": "a", "x": 1{"0" * 30}}}\n'), ("BAD 0", "64")),
    "half of a pair": ("jsonl", text(f'{{"prompt": "\\ud800", "answer": "a"}}\n{GOOD}'), ("BAD 0", "ROW 1")),
    "bytes": ("jsonl", text(b"\xff\xfe\x00\n" + GOOD.encode()), ("BAD 0", "ROW 1")),
    "deep list": ("json", text(nested(100_000)), ("REFUSED", "nested")),
    "deep row of a list": ("json", text(f'[{GOOD}, {{"prompt": {nested(300)}}}]'), ("ROW 0", "BAD 1")),
    "list of 50 MB": ("json", text(f'[{GOOD}, {{"prompt": "{LARGE}", "answer": "a"}}]'), ("ROW 0", "BAD 1", "MB")),
    "JSON of 6 GB": ("json", sparse(6 << 30), ("REFUSED", "bytes")),
    "CSV of 50 MB": ("csv", text(f"prompt,answer\n{LARGE},a\n"), ("REFUSED", "field")),
    "CSV of 6 GB": ("csv", sparse(6 << 30), ("REFUSED", "bytes")),
    "CSV with an open quote": ("csv", text('prompt,answer\n"' + LARGE), ("REFUSED",)),
    "many fields": ("csv", text("prompt,answer\n" + "," * 1_000_000 + "\n"), ("BAD 0", "fields")),
    "pages of zeros": ("parquet", zeros_in_pages, ("REFUSED", "row group")),
    "repeated text": ("parquet", repeated_text, ("ROW 0", "ROW 20")),
    "repeated text in lists": ("parquet", repeated_in_lists, ("BAD 0", "MB")),
    "repeated numbers": ("parquet", repeated_numbers, ("BAD 0", "MB")),
    "texts that are not UTF-8": ("parquet", bytes_as_text, ("BAD 0", "ROW 1")),
    "no Parquet": ("parquet", text(b"PAR1" + b"\xff" * 1000 + b"PAR1"), ("REFUSED", "Parquet")),
    "Parquet of 6 GB": ("parquet", sparse(6 << 30), ("REFUSED", "Parquet")),
    "pipe": ("jsonl", os.mkfifo, ("REFUSED", "pipe")),
    "Parquet pipe": ("parquet", os.mkfifo, ("REFUSED", "pipe")),
    "device": ("jsonl", lambda file: file.symlink_to("/dev/zero"), ("REFUSED", "device")),
    "CSV device": ("csv", lambda file: file.symlink_to("/dev/zero"), ("REFUSED", "device")),
    "socket": ("json", socket_file, ("REFUSED", "socket")),
    "folder": ("jsonl", lambda file: file.mkdir(), ("REFUSED", "folder")),
    "nothing": ("jsonl", lambda file: file.symlink_to(file.name), ("REFUSED",)),
}


@pytest.fixture(scope="module")
def read_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], float]]:
    """Reads all files of `DATA` in one process with limits. Returns the result and the seconds of each file."""
    folder, asked = tmp_path_factory.mktemp("rows"), []
    for number, (case, (suffix, write, _)) in enumerate(DATA.items()):
        file = folder / f"{number}.{suffix}"
        write(file)
        asked.append(json.dumps([case, str(file)]))
    ended = subprocess.run(
        [sys.executable, "-c", _READ_ALL, str(CASE_GIB), str(CASE_S)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        input="\n".join(asked),
        capture_output=True,
        text=True,
        timeout=CASE_S * len(DATA),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return {case: (lines, seconds) for case, lines, seconds in map(json.loads, ended.stdout.splitlines())}


@pytest.mark.parametrize("case", DATA)
def test_a_hostile_data_file_is_refused_or_loses_its_row(
    case: str, read_files: dict[str, tuple[list[str], float]]
) -> None:
    lines, seconds = read_files[case]
    printed = "\n".join(lines)
    assert all(word in printed for word in DATA[case][2]), printed
    assert "ENDED" not in printed and seconds < CASE_S


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    content=st.binary(max_size=200)
    | st.text(st.sampled_from('{}[]",:\\ud80prompt answer0123456789.eE-\n'), max_size=200)
)
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_fuzzed_files_give_rows_bad_rows_or_a_value_error(suffix: str, content: Any, tmp_path: Path) -> None:
    file = tmp_path / f"rows.{suffix}"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        rows = open_rows(file, KEYS)
    except ValueError:
        return
    for number in range(len(rows)):
        try:
            json.dumps(rows[number]).encode()
        except BadRow as error:
            str(error).encode()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(st.sampled_from('[]{}":,1a\\'), max_size=300), st.integers(0, 2000))
def test_fuzzed_json_gives_a_value_or_a_value_error(content: str, depth: int) -> None:
    for whole in (content, nested(depth), nested(depth, opening='{"a":', closing="}"), "[" * depth + content):
        try:
            value = decode_json(whole, object)
        except ValueError:
            continue
        assert json.loads(json.dumps(value)) == value
    if depth > MAX_DEPTH:
        with pytest.raises(ValueError, match="nested"):
            decode_json(nested(depth), object)


def test_a_plain_file_is_opened_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    file.write_text("x")
    (tmp_path / "link").symlink_to(file)
    began = time.monotonic()
    with pytest.raises(ValueError, match="pipe"):
        open_regular(pipe)
    assert time.monotonic() - began < 1.0
    with open_regular(tmp_path / "link") as opened:
        assert opened.read() == b"x"


# -- models -----------------------------------------------------------------------------------------------------------
def model(folder: Path, *, config: dict[str, Any] | None = None, template: str | None = None) -> Path:
    """Writes the files of a tiny model, without weights."""
    folder.mkdir(exist_ok=True)
    write_prompt_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(tiny_config("tiny_qwen3") | (config or {})))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


SIZES: dict[str, dict[str, Any]] = {
    "layers": {"num_hidden_layers": 10**9},
    "layers of 400 digits": {"num_hidden_layers": 10**400},
    "no layers": {"num_hidden_layers": 0},
    "negative layers": {"num_hidden_layers": -1},
    "layers as text": {"num_hidden_layers": "2"},
    "layers as a float": {"num_hidden_layers": 1e9},
    "layers as a bool": {"num_hidden_layers": True},
    "layers as a list": {"num_hidden_layers": [2] * 5000},
    "width": {"hidden_size": 10**12},
    "width 0": {"hidden_size": 0},
    "feed-forward": {"intermediate_size": 10**12},
    "heads": {"num_attention_heads": 10**9},
    "heads 0": {"num_attention_heads": 0},
    "key heads": {"num_key_value_heads": -2},
    "head": {"head_dim": 10**9},
    "vocabulary": {"vocab_size": 10**10},
    "vocabulary as text": {"vocab_size": "151936"},
    "positions": {"max_position_embeddings": 10**18},
    "experts": {"num_experts": 10**9},
    "experts in a part": {"text_config": {"num_local_experts": 10**9}},
    "vision": {"vision_config": {"depth": 10**9}},
    "audio": {"thinker_config": {"audio_config": {"encoder_layers": 10**9}}},
    "end token": {"eos_token_id": {"a": 1}},
    "end tokens": {"eos_token_id": ["a", 1]},
}


@pytest.mark.parametrize("case", SIZES)
def test_a_size_out_of_its_range_is_refused_by_its_key(case: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "m", config=SIZES[case])
    key = next(iter(SIZES[case]))
    inner = SIZES[case][key]
    while isinstance(inner, dict) and key != "eos_token_id":
        key, inner = next(iter(inner.items()))
    began = time.process_time()
    with pytest.raises(ValueError, match=key):
        _ = folder_architecture(folder), end_token_ids(folder)
    assert time.process_time() - began < CASE_S


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    key=st.sampled_from([*tiny_config("tiny_qwen3"), "head_dim", "layer_types", "rope_scaling", "rope_parameters"]),
    value=st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.lists(st.integers() | st.text(max_size=3), max_size=3)
    | st.dictionaries(st.sampled_from(["rope_type", "factor", "a"]), st.integers() | st.text(max_size=3), max_size=2),
)
def test_a_fuzzed_config_gives_an_architecture_or_a_value_error(key: str, value: Any, tmp_path: Path) -> None:
    folder = model(tmp_path / "m", config={key: value})
    try:
        folder_architecture(folder)
    except ValueError as error:
        str(error).encode()


def test_a_config_of_experts_beyond_all_models_is_refused(tmp_path: Path) -> None:
    many = {"num_hidden_layers": 1024, "num_experts": 1 << 14, "num_local_experts": 1 << 14}
    folder = model(tmp_path / "m", config=tiny_config("tiny_qwen3_moe") | many)
    with pytest.raises(ValueError, match="experts"):
        folder_architecture(folder)


def header(length: int, content: bytes = b"") -> Callable[[Path], Any]:
    return lambda file: file.write_bytes(length.to_bytes(8, "little") + content)


def index(content: str) -> Callable[[Path], Any]:
    return lambda file: file.with_name("model.safetensors.index.json").write_text(content)


def index_to(target: str) -> Callable[[Path], Any]:
    return index(json.dumps({"weight_map": {"a": target}}))


WEIGHTS: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "device": lambda file: file.symlink_to("/dev/zero"),
    "folder": lambda file: file.mkdir(),
    "socket": socket_file,
    "longest header": header((1 << 64) - 1),
    "header beyond the file": header(90_000_000, b"{}"),
    "deep header": header(100_000, nested(50_000)[:100_000].encode()),
    "header that is not JSON": header(4, b"\xff" * 4),
    "empty": lambda file: file.write_bytes(b""),
    "sparse": lambda file: sparse(6 << 30)(file),
    "index that is a pipe": lambda file: os.mkfifo(file.with_name("model.safetensors.index.json")),
    "index of 6 GB": lambda file: sparse(6 << 30)(file.with_name("model.safetensors.index.json")),
    "deep index": index(nested(100_000)),
    "index to a device": index_to("../../../../../../../../dev/zero"),
    "index to nothing": index_to("missing.safetensors"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_hostile_weight_files_are_refused_at_once(case: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    WEIGHTS[case](folder / "model.safetensors")
    began = time.process_time()
    with pytest.raises(ValueError, match=r"model.safetensors|zero|missing"):
        _ = weight_files(folder), stored_kinds(folder)
    assert time.process_time() - began < CASE_S


FILES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "config that is a pipe": ("config.json", os.mkfifo),
    "config of 6 GB": ("config.json", sparse(6 << 30)),
    "deep config": ("config.json", text(nested(100_000, opening='{"a":', closing="}"))),
    "config that is decoded and is too deep": ("config.json", text(nested(900, opening='{"a":', closing="}"))),
    "config that is a list": ("config.json", text("[1]")),
    "generation settings that are a pipe": ("generation_config.json", os.mkfifo),
}


@pytest.mark.parametrize("case", FILES)
def test_hostile_settings_of_a_model_are_refused_at_once(case: str, tmp_path: Path) -> None:
    name, write = FILES[case]
    folder = model(tmp_path / "m")
    (folder / name).unlink(missing_ok=True)
    write(folder / name)
    with pytest.raises(ValueError, match=name):
        _ = read_hf_config(folder), end_token_ids(folder)


LOOP = "{% for i in range(99999) %}"
TEMPLATES = {
    "range": "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    "nested loops": LOOP + LOOP + LOOP + "{% endfor %}" * 3,
    "text that is multiplied while it compiles": '{{ "a" * 10**10 }}',
    "text that is multiplied": "{% set n = messages|length * 10**10 %}{{ 'a' * n }}",
    "text that doubles": "{% set ns = namespace(t='aaaaaaaa') %}{% for i in range(60) %}"
    "{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t }}",
    "filter that pads": '{{ "a"|center(10**10) }}',
    "format that pads": '{{ "%10000000000d" % 1 }}',
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "branching recursion": "{% macro f(n) %}{% if n < 60 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}"
    "{{ f(0) }}",
    "deep expression": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "list": "{% set n = [0] * (10 ** 10) %}{{ n|length }}",
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_a_chat_template_without_bounds_is_refused_before_the_start(case: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "m", template=TEMPLATES[case])
    with pytest.raises(ValueError, match="chat template"):
        try_tokenizer(folder)


def test_a_chat_template_that_is_no_program_without_end_passes_the_trial(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    try_tokenizer(folder)
    (folder / "tokenizer.json").touch()
    try_tokenizer(folder)


TOKENIZERS: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "6 GB": sparse(6 << 30),
    "deep": text('{"model": ' + nested(100_000) + "}"),
    "no JSON": text(b"\xff" * 100),
    "large id": lambda file: file.write_text(
        json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 2**40}, "unk_token": "a"}})
    ),
}


def loaded(folder: Path) -> PromptTokenizer:
    """Loads a tokenizer like the start of a run."""
    try_tokenizer(folder, template=False)
    return PromptTokenizer(folder)


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_hostile_tokenizer_is_refused_before_the_start(case: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    TOKENIZERS[case](folder / "tokenizer.json")
    with pytest.raises(ValueError, match="tokenizer"):
        loaded(folder)


# -- prompts ----------------------------------------------------------------------------------------------------------
ROOM = 128  # prompt limit in tokens


def maker(overlong: Overlong) -> PromptMaker:
    env = find_env("single_turn")
    return PromptMaker(
        env=env,
        env_config=env.config(name="single_turn"),
        tokenizer=tiny_prompt_tokenizer(),
        max_prompt_tokens=ROOM,
        overlong=overlong,
    )


@contextmanager
def watched() -> Iterator[list[float]]:
    """Yields a list. After the block, the list has the longest time without a run of another thread."""
    ended, gaps = threading.Event(), [0.0]

    def watch() -> None:
        last = time.monotonic()
        while not ended.wait(0.01):
            now = time.monotonic()
            gaps[0], last = max(gaps[0], now - last), now

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield gaps
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("overlong", Overlong)
def test_a_prompt_of_15_mb_is_not_tokenised(overlong: Overlong) -> None:
    made, row = maker(overlong), {"prompt": "1 + 1 = " * 2_000_000, "answer": "2"}
    began = time.process_time()
    with watched():
        if overlong in (Overlong.drop, Overlong.error):
            with pytest.raises(ValueError, match=r"tokens"):
                asyncio.run(made.prompt(row, where="rows.jsonl, line 1", owner="o"))
        else:
            prompt = asyncio.run(made.prompt(row, where="rows.jsonl, line 1", owner="o"))
            assert ROOM - 8 <= len(prompt.token_ids) <= ROOM
    assert made.count(row, where="") > ROOM
    assert time.process_time() - began < CASE_S


def test_a_text_that_may_fit_is_tokenised_without_the_lock_of_the_interpreter() -> None:
    tokenizer = tiny_prompt_tokenizer()
    with watched() as gaps:
        count = len(tokenizer.encode([{"role": "user", "content": "1" * 400_000}]))
    assert count > 400_000 and gaps[0] < 0.5
    with pytest.raises(TextTooLong) as error:
        tokenizer.encode([{"role": "user", "content": "1" * 400_000}], most_tokens=1000)
    assert error.value.tokens > 1000


def test_halves_of_pairs_are_tokens_like_any_unknown_character() -> None:
    tokenizer = tiny_prompt_tokenizer()
    assert len(tokenizer.encode([{"role": "user", "content": "1\ud8001"}])) > 3
    assert len(tokenizer.plain_spans("1\ud8001")) == 3


def test_a_large_integer_may_be_an_answer_and_every_row_can_be_sent_to_a_worker(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"question": "p", "solution": 1{"0" * 30}}}\n')
    row = open_rows(file, RowKeys(prompt="question", answer="solution"))[0]
    assert row["answer"] == row["solution"] == "1" + "0" * 30
    msgspec.msgpack.encode(row)


def test_the_rows_of_a_limit_are_rows_that_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    row = {"prompt": "x" * (MAX_ROW_BYTES - 1000), "answer": "a", "deep": json.loads(nested(MAX_DEPTH - 2))}
    file.write_text(json.dumps(row) + "\n")
    assert open_rows(file, KEYS)[0]["deep"] == row["deep"]
