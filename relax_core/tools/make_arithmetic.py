"""Writes arithmetic word problems as JSONL, one object ``{"question": …, "answer": …}`` per line."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from relax_core.contracts.output_path import check_output_file
from relax_core.data.generated import example


def write_arithmetic(path: Path, *, rows: int, seed: int) -> None:
    """Writes ``rows`` problems. The same seed gives the same file."""
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        for index in range(rows):
            drawn_example = example("arithmetic", split="train", seed=seed, index=index)
            file.write(encoder.encode({"question": drawn_example.prompt, "answer": drawn_example.answer}) + b"\n")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Write arithmetic word problems as JSONL.")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        check_output_file(arguments.out, option="--out")
    except ValueError as error:
        parser.error(str(error))
    write_arithmetic(arguments.out, rows=arguments.rows, seed=arguments.seed)
    print(f"{arguments.rows} rows in {arguments.out}")


if __name__ == "__main__":
    main()
