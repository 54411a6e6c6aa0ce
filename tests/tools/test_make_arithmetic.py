from __future__ import annotations

from pathlib import Path

from relax_core.data.data_files import RowKeys, open_rows
from relax_core.tools.make_arithmetic import write_arithmetic

SHIPPED = Path(__file__).parents[2] / "examples" / "arithmetic.jsonl"


def test_the_shipped_file_is_what_the_tool_writes(tmp_path: Path) -> None:
    write_arithmetic(tmp_path / "rows.jsonl", rows=500, seed=0)
    assert (tmp_path / "rows.jsonl").read_bytes() == SHIPPED.read_bytes()
    assert len(open_rows(SHIPPED, RowKeys(prompt="question", answer="answer"))) == 500
