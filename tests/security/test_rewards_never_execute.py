"""Tests that no reward evaluates an answer, a label or a column of a data row.

Each case contains a program that creates a folder. One process with an audit hook scores all cases. Afterwards no
folder exists, and nothing was compiled, executed, unpickled, started, connected or opened for writing.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_core.registry import names
from tests.security import scoring_process

ROOT = Path(__file__).parents[2]
MATHEMATICS: dict[str, dict[str, Any]] = {
    "math": {},
    "math boxed": {"rule": "boxed"},
    "deepscaler": {},
    "geo3k": {},
    "openr1mm": {},
}
TEXTS = (
    *("dapo", "f1", "gpqa", "multiple_choice", "deepeyes", "exact_match", "final_answer", "reverse_digits"),
    "format_think",
)
INSTRUCTIONS = ("ifeval", "ifbench")
# Rewards that read no answer (env), read the response of a server or a judge (remote, genrm), sum other rewards (mix),
# or use a package that evaluates text in a sandbox (reasoning_gym).
OTHERS = {"env", "remote", "genrm", "mix", "reasoning_gym", "repetition"}


def _octal(code: str) -> str:
    return "".join(f"\\{ord(char):03o}" for char in code)


def _hex(code: str) -> str:
    return "".join(f"\\x{ord(char):02x}" for char in code)


def _unicode(code: str) -> str:
    return "".join(f"\\u{ord(char):04x}" for char in code)


def _wide(text: str) -> str:
    return "".join(chr(ord(char) + 0xFEE0) if "!" <= char <= "~" else char for char in text)


def _characters(text: str) -> str:
    """Returns the text as a sum of characters of docstrings, without quotes, parentheses or spaces."""
    import numpy

    documentations = {
        f"numpy.{name}.__doc__": str(getattr(numpy, name).__doc__) for name in ("einsum", "kaiser", "polyfit")
    }
    return "+".join(
        next(f"{name}[{found}]" for name, words in documentations.items() if (found := words.find(char)) >= 0)
        for char in text
    )


DIFF, LAMBDIFY = "\u217e\u2170ff", "𝑙𝑎𝑚𝑏𝑑𝑖𝑓𝑦"  # Python normalises identifiers: DIFF becomes diff
DEEP = 500  # these braces make pylatexenc fail, so the text's backslashes remain


def _deep(text: str) -> str:
    return "{" * DEEP + text + "}" * DEEP


def _series(code: str) -> str:
    """Returns a series with text as terms: sympy writes the text into a program that sums the series."""
    return rf"\sum_{{n=0}}^{{\infty}} \text{{{code}}}^n/n!"


def _series_that_starts(path: str) -> str:
    """Returns a series with a class and a command. Subscription of the class calls os.system with the command."""
    takes = "for[numpy.mgrid.__class__.__getitem__]in[[numpy.f2py.os.system]]"
    return _series(f"[numpy.mgrid[{_characters(f'mkdir {path}')}]{takes}][0]")


FAMILIES: dict[str, Callable[[str], str]] = {  # folder that the program creates → text of the case
    "octal in a Roman diff": lambda path: _deep(f"x.{DIFF}('{_octal(_code(path))}')"),
    "octal in a wide diff": lambda path: _deep(f"x.{_wide('diff')}('{_octal(_code(path))}')"),
    "octal in a Roman diff of a number": lambda path: _deep(f'1+(2).{DIFF}("{_octal(_code(path))}")'),
    "octal in subs": lambda path: _deep(f"x.{_wide('subs')}('{_octal(_code(path))}',1)"),
    "hex in a Roman diff": lambda path: _deep(f"x.{DIFF}('{_hex(_code(path))}')"),
    "unicode in a Roman diff": lambda path: _deep(f"x.{DIFF}('{_unicode(_code(path))}')"),
    "octal without braces": lambda path: f"x.{DIFF}('{_octal(_code(path))}')",
    "octal in ln": lambda path: _deep(f"ln('{_octal(_code(path))}')"),
    "octal in re": lambda path: _deep(f"re('{_octal(_code(path))}')"),
    "octal in sqrt": lambda path: _deep(f"sqrt('{_octal(_code(path))}')"),
    "octal in an f-string": lambda path: _deep(f"ln(f'{_octal(_code(path))}')"),
    "series that starts a program": _series_that_starts,
    "series with an import": lambda path: _series(f"[numpy.mgrid[{_characters(path)}]for[numpy.mgrid.x]in[[1]]]"),
    "series of code": lambda path: _series(_code(path)),
    "bold series": lambda path: rf"\sum_{{n=0}}^{{\infty}} \mathbf{{{_code(path)}}}^n/n!",
    "product of code": lambda path: rf"\prod_{{n=1}}^{{\infty}} \text{{{_code(path)}}}/n",
    "plain": lambda path: _code(path),
    "dollars": lambda path: f"${_code(path)}$",
    "dunder chain": lambda path: (
        f"().__class__.__base__.__subclasses__()[0].__init__.__globals__['os'].mkdir('{path}')"
    ),
    "wide letters": lambda path: _wide(_code(path)),
    "look-alikes": lambda path: f"{LAMBDIFY}('x','{_code(path)}')(1)",
    "lambda": lambda path: f"(lambda: {_code(path)})()",
    "walrus": lambda path: f"[y:={_code(path)}]",
    "f-string": lambda path: f"f'{{{_code(path)}}}'",
    "sympify": lambda path: f'sympify("{_code(path)}")',
    "S": lambda path: f'S("{_code(path)}")',
    "N": lambda path: f'N("{_code(path)}")',
    "diff": lambda path: f'diff("{_code(path)}","x")',
    "Integral": lambda path: f'Integral("{_code(path)}",x)',
    "lambdify": lambda path: f'lambdify(x,"{_code(path)}")(1)',
    "Function": lambda path: f'Function("f")("{_code(path)}")',
    "srepr": lambda path: f'srepr("{_code(path)}")',
    "operatorname": lambda path: rf"\operatorname{{{_code(path)}}}(1)",
    "text": lambda path: rf"\text{{{_code(path)}}}",
    "mathrm": lambda path: rf"2+\mathrm{{{_code(path)}}}",
    "mathit": lambda path: rf"2\mathit{{{_code(path)}}}",
    "left": lambda path: rf"\left.{_code(path)}\right|_{{x=1}}",
    "matrix": lambda path: rf"\begin{{pmatrix}} \text{{{_code(path)}}} & 1 \\ 2 & 3 \end{{pmatrix}}",
    "log": lambda path: rf"\log_{{\text{{{_code(path)}}}}} 8",
    "fraction": lambda path: rf"\frac{{\text{{{_code(path)}}}}}{{os}}",
    "subscript": lambda path: f"x_{{{_code(path)}}}",
    "root equation": lambda path: rf"\text{{{_code(path)}}}^5-\text{{{_code(path)}}}-1=0",
    "input": lambda path: rf"\input{{{path}}}\write18{{mkdir {path}}}",
    "number of other digits": lambda path: f"٣.{DIFF}('{_octal(_code(path))}')",
    "YAML": lambda path: f"!!python/object/apply:os.mkdir ['{path}']",
    "JSON": lambda path: json.dumps({"py/reduce": [{"py/function": "os.mkdir"}, {"py/tuple": [path]}]}),
    "pickle": lambda path: base64.b64encode(pickle.dumps(_Pickled(path))).decode(),
    "jinja": lambda path: f"{{{{ cycler.__init__.__globals__.os.mkdir('{path}') }}}}",
    "format string": lambda path: "{0.__class__.__init__.__globals__[os]} %(x)s " + path,
    "shell": lambda path: f"$(mkdir {path}) `mkdir {path}`",
}


class _Pickled:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def _code(path: str) -> str:
    return f"__import__('os').mkdir('{path}')"


def _response(text: str) -> str:
    return f"<think>t</think> Answer: <answer>\\boxed{{{text}}}</answer>"


def _cases(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def add(reward: str, family: str, side: str, *, row: Callable[[str], dict[str, Any]] | None = None) -> None:
        path = str(folder / str(len(found)))
        text = FAMILIES[family](path)
        if reward in ("math", "openr1mm"):  # with these braces math-verify does not terminate
            text = text.replace("{" * DEEP, "").replace("}" * DEEP, "")
        right_label = r"$\sqrt{5}$" if reward == "openr1mm" else r"\sqrt{5}"  # math-verify reads labels between dollars
        text = f"${text}$" if (reward, side) == ("openr1mm", "label") else text
        found.append(
            {
                "reward": reward.split()[0],
                "settings": MATHEMATICS.get(reward, {}),
                "response": _response(text if side == "answer" else r"\sqrt{5}"),
                "answer": text if side == "label" else right_label,
                "row": row(text) if row else {},
                "family": family,
                "side": side,
                "path": path,
            }
        )

    for family in FAMILIES:
        for side in ("answer", "label"):
            for reward in MATHEMATICS:
                add(reward, family, side)
            for reward in TEXTS:
                add(reward, family, side, row=lambda text: {"choices": ["red", text], "references": [text]})
        for reward in INSTRUCTIONS:
            for row in ROWS[reward]:
                add(reward, family, "answer", row=row)
    return found


def _instruction(name: str, *keys: str) -> Callable[[str], dict[str, Any]]:
    """Returns a row with one instruction. Its arguments are the text; a key with a star gets a list with the text."""

    def row(text: str) -> dict[str, Any]:
        values = {key.rstrip("*"): [text] if key.endswith("*") else text for key in keys}
        return {"instruction_id_list": [name], "kwargs": [values]}

    return row


ROWS: dict[str, list[Callable[[str], dict[str, Any]]]] = {
    "ifeval": [
        _instruction("keywords:existence", "keywords*"),
        _instruction("keywords:frequency", "keyword", "relation"),
        _instruction("language:response_language", "language"),
        _instruction("detectable_content:postscript", "postscript_marker"),
        _instruction("detectable_format:multiple_sections", "section_spliter"),
        _instruction("combination:repeat_prompt", "prompt_to_repeat"),
        _instruction("startend:end_checker", "end_phrase"),
        _instruction("detectable_format:json_format"),
        lambda text: {"instruction_id_list": [text], "kwargs": [{text: text}]},
        lambda text: {"instruction_id_list": ["keywords:existence"], "kwargs": [{"__class__": text, text: text}]},
    ],
    "ifbench": [
        _instruction("ratio:overlap", "reference_text"),
        _instruction("format:options", "options"),
        _instruction("format:list", "sep"),
        _instruction("words:keywords_specific_position", "keyword"),
        _instruction("repeat:repeat_change", "prompt_to_repeat"),
        lambda text: {"instruction_id_list": [text], "kwargs": [{}]},
    ],
}


def scored(cases: list[dict[str, Any]], *, tree: Path = ROOT) -> list[dict[str, Any]]:
    """Scores the cases in a process that imports the rewards of ``tree``."""
    process = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tree)!r})\n" + PROGRAM],
        input=json.dumps(cases).encode(),
        stdout=subprocess.PIPE,
        cwd="/",
        timeout=300,
        check=True,
    )
    results = json.loads(process.stdout)
    assert len(results) == len(cases)
    return [
        {**case, **result, "ran": os.path.exists(case["path"])} for case, result in zip(cases, results, strict=True)
    ]


PROGRAM = f"import runpy; runpy.run_path({scoring_process.__file__!r}, run_name='__main__')"


def test_every_reward_that_reads_an_answer_has_cases() -> None:
    covered = {reward.split()[0] for reward in (*MATHEMATICS, *TEXTS, *INSTRUCTIONS)}
    assert covered | OTHERS == set(names("reward"))


def test_no_answer_and_no_label_is_evaluated(shared_folder: Path) -> None:
    pytest.importorskip("pylatexenc")
    pytest.importorskip("if_verifiable")
    cases = _cases(shared_folder)
    assert len(cases) >= 200
    results = scored(cases)
    assert [result for result in results if result["ran"]] == []
    wrong = [
        (result["reward"], result["family"], result["side"], result["events"][:2])
        for result in results
        if result["events"]
    ]
    assert wrong == []
    assert not any(shared_folder.iterdir())


def test_the_watch_sees_code_that_runs(shared_folder: Path) -> None:
    """Scores a reward that evaluates its answer in the same process, and checks that the hook detects it."""
    path = shared_folder / "ran"
    plugin = shared_folder / "evaluates.py"
    plugin.write_text(
        "from relax_core.contracts.reward import RewardConfig, RewardOutput, RewardSpec\n"
        "from dataclasses import dataclass\n\n\n"
        "@dataclass(frozen=True)\nclass Config(RewardConfig):\n    name: str = 'evaluates'\n\n\n"
        "def score(given, config):\n    eval(given.answer)\n    return RewardOutput(reward=1.0)\n\n\n"
        "SPEC = RewardSpec(name='evaluates', summary='evaluates', config=Config, score=score)\n"
    )
    case = {"reward": str(plugin), "response": "", "answer": _code(str(path)), "path": str(path)}
    (result,) = scored([case])
    assert result["ran"]
    assert any(event.startswith("compile") for event in result["events"])
    assert any(event.startswith("os.mkdir") for event in result["events"])
