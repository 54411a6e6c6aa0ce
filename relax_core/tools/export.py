"""`relax export CHECKPOINT OUT` writes a checkpoint, or a LoRA adapter with its base model, as a Hugging Face folder.

CHECKPOINT is a folder in a run's checkpoints/, saved in any parallel layout, or a PEFT folder. One process reads it,
without Ray.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from relax_core.config.rerun import check_powers, is_marked_by_user
from relax_core.contracts.output_path import check_output_folder
from relax_core.families.folder import ADAPTER_FILE
from relax_core.observe.standard_streams import unread_streams
from relax_core.tools.make_tiny import tiny_model_folder
from relax_core.train.checkpoints.checkpoint_store import CONFIG, META, CheckpointStore
from relax_core.train.checkpoints.provenance import read_provenance

DTYPES = ("float32", "bfloat16")
POLICY = "train"  # folder of the policy's weights in a checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns 0, or prints the reason to stderr and returns 2 if it wrote nothing."""
    parser = argparse.ArgumentParser(prog="relax export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="such as RUN/checkpoints/step_00000100, or a PEFT folder")
    parser.add_argument("out", type=Path, help="the output folder, which must be missing or empty")
    parser.add_argument("--dtype", choices=DTYPES, help="default: the dtype of each tensor in the model's folder")
    parser.add_argument(
        "--model", type=Path, help="folder of configuration and tokenizer; default: the run's or the adapter's model"
    )
    parser.add_argument("--adapter", action="store_true", help="write the LoRA factors of a run as a PEFT folder")
    parser.add_argument("--shard-gb", type=float, default=4.0, help="largest file; default: 4")
    parser.add_argument("--trust", action="store_true", help="run the plug-in file of a foreign run's model family")
    parsed = parser.parse_args(arguments)
    try:
        export(
            parsed.checkpoint,
            parsed.out,
            model=parsed.model,
            dtype=parsed.dtype,
            shard_gb=parsed.shard_gb,
            trust=parsed.trust,
            adapter=parsed.adapter,
        )
    except (ValueError, OSError) as error:
        print(f"relax: {error}", file=sys.stderr)
        return 2
    print(f"Hugging Face model  {parsed.out}")
    return 0


def export(
    checkpoint: Path,
    out: Path,
    *,
    model: Path | None,
    dtype: str | None,
    shard_gb: float,
    trust: bool,
    adapter: bool = False,
) -> None:
    """Checks every file of a checkpoint against its digest, then writes to ``out``, a missing or empty folder.

    Existing files are never replaced or removed. Without ``trust``, refuses a model family from a file if the run
    belongs to another user. Raises the ValueError and OSError of `relax_core.train.hf.hf_export.export_checkpoint`. If
    ``checkpoint`` is a PEFT folder or has LoRA factors, writes the base model with the factors merged. With
    ``adapter``, writes the factors of a checkpoint as a PEFT folder.
    """
    if shard_gb <= 0:
        raise ValueError(f"--shard-gb {shard_gb:g}: must be more than 0.")
    shard_bytes = int(shard_gb * 1e9)
    if (checkpoint / ADAPTER_FILE).is_file() and not adapter:
        check_output_folder(out, option="OUT")
        from relax_core.train.hf.peft_folder import merge_peft

        merge_peft(checkpoint, out.absolute(), base=model, dtype=dtype, shard_bytes=shard_bytes)
        return
    if not (checkpoint / META).is_file():
        beside = sorted(
            path.parent.name for path in (*checkpoint.parent.glob(f"*/{META}"), *checkpoint.glob(f"*/*/{META}"))
        )
        there = f"there are {', '.join(beside[-5:])}" if beside else "such as step_00000100"
        what = f"no {META} there" if checkpoint.is_dir() else "no such folder"
        raise ValueError(f"{checkpoint}: {what}. Give a folder of a run's checkpoints/; {there}.")
    check_output_folder(out, option="OUT")
    # checks the command line before this import, which takes seconds
    from relax_core.train.hf.hf_export import export_checkpoint

    CheckpointStore.verify(checkpoint)
    keys, own_run = _model_keys(checkpoint)
    if not own_run and not trust:
        check_powers({"model": {"family": keys.get("family")}}, checkpoint / CONFIG)
    folder = model if model is not None else _model_of_run(keys)
    if read_provenance(checkpoint / POLICY).lora is not None:
        from relax_core.train.hf.peft_folder import export_lora_checkpoint

        export_lora_checkpoint(
            checkpoint / POLICY,
            out.absolute(),
            base=folder,
            adapter=adapter,
            family=keys.get("family"),
            dtype=dtype,
            shard_bytes=shard_bytes,
        )
        return
    if adapter:
        raise ValueError(f"--adapter: {checkpoint} has no LoRA factors. Export it as a whole model, without --adapter.")
    export_checkpoint(
        checkpoint / POLICY,
        out.absolute(),
        model_folder=folder,
        family=keys.get("family"),
        dtype=dtype,
        shard_bytes=shard_bytes,
    )


def _model_of_run(saved: Mapping[str, Any]) -> Path:
    """Returns the model folder of the run that saved the checkpoint."""
    if saved["path"] is None:
        return tiny_model_folder(saved["builtin"], task=saved["task"])
    folder = Path(saved["path"])
    if not folder.is_dir():
        raise ValueError(f"model.path={folder} of the run does not exist. Give the model's folder: --model FOLDER.")
    return folder


def _model_keys(checkpoint: Path) -> tuple[dict[str, Any], bool]:
    """Returns the section ``model`` of the run's saved configuration, and whether the run belongs to this user."""
    text = (checkpoint / CONFIG).read_text(encoding="utf-8")
    return yaml.safe_load(text)["model"], is_marked_by_user(text)


if __name__ == "__main__":
    with unread_streams():
        sys.exit(main())
