"""Checks Relax on this machine's GPU and writes a report: ``make gpu-check``.

    python -m benchmarks.gpu_check [--device cuda] [--only NAME …] [--report FOLDER]

Needs one NVIDIA GPU, a torch that finds it, and no network. It takes at most ten minutes. Each part runs in a process
with a deadline, so that a part that crashes or hangs costs only its own lines:

- parity: three train steps of each family, on the GPU and on the CPU;
- attention: compiled FlexAttention against a dense mask;
- gap: how much of the log-prob gap in bfloat16 comes from weights, attention and products;
- offload: bits of weights, optimizer and checkpoint after the state was on the host, and the memory that stays;
- sizes: memory, seconds and tokens/s of Qwen3-0.6B and 4B, against the plan;
- run: a run with a trainer on the GPU; colocate: trainer and SGLang share the GPU, if SGLang is installed;
- killed: a trainer on the GPU is killed, and no sample is lost.

``--device gpu_branch_on_cpu`` runs the same parts on CPU tensors, with small sizes: it tests this command, not a GPU.
The report is FOLDER/gpu_check.md and FOLDER/gpu_check.json. The exit code is 1 if a line failed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import HERE, ONE_THREAD

CUDA, ON_CPU = "cuda", "gpu_branch_on_cpu"
PART_S, RUN_S, TOTAL_S = 240.0, 150.0, 600.0  # deadlines in seconds
PARITY = {"float32": 5e-5, "bfloat16": 3e-2}  # relative; on CPU tensors the branches differ by at most 5e-6
ATTENTION = {"float32": 1e-5, "bfloat16": 1e-2}  # relative norm; float32 sums in another order
GAP = 1e-4  # largest log-prob gap of a run in float32
MEMORY, LEFT_BYTES = 0.10, 107_374_182  # a tenth of the prediction; 0.1 GiB
RUN_STEPS, KILLED_AT = 12, 3


@dataclass(frozen=True, kw_only=True)
class Line:
    """Holds a row of the report. ``ok`` is None for a number without a bound and for a check that was not run."""

    check: str
    what: str
    found: str
    wanted: str = ""
    ok: bool | None = None


class PartFailed(Exception):
    """Says why a part has no result."""


@dataclass(frozen=True, kw_only=True)
class Given:
    """Holds the device, the folder for all results, and the time at which all parts must have ended."""

    device: str
    folder: Path
    until: float

    def environment(self, device: str) -> Mapping[str, str]:
        """Returns the environment of a part."""
        path = os.pathsep.join([str(HERE), str(HERE / "tests" / "train")])
        return os.environ | ONE_THREAD | {"PYTHONPATH": path, "RELAX_TRAIN_DEVICE": device}

    def left(self, limit_s: float) -> float:
        """Returns the seconds that a part may take, at most ``limit_s``. Raises PartFailed if no time is left."""
        left = min(limit_s, self.until - time.monotonic())
        if left <= 0:
            raise PartFailed("not run: ten minutes have passed")
        return left

    def part(self, name: str, device: str | None = None) -> Mapping[str, Any]:
        """Runs a part in a process and returns its result. Raises PartFailed."""
        device = device or self.device
        left = self.left(PART_S)
        command = [sys.executable, "-m", "benchmarks.gpu_check_part", name, str(self.folder)]
        try:
            done = subprocess.run(
                command,
                cwd=HERE,
                env=self.environment(device),
                capture_output=True,
                text=True,
                timeout=left,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise PartFailed(f"{name} on {device} has not ended after {left:.0f} s") from error
        if done.returncode:
            raise PartFailed(f"{name} on {device} ended with {done.returncode}: {done.stderr.strip()[-800:]}")
        found: Mapping[str, Any] = json.loads((self.folder / f"{name}-{device}.json").read_text(encoding="utf-8"))
        return found


def check_parity(given: Given) -> Iterator[Line]:
    """Compares losses, gradient norms and weights after three steps with the CPU's."""
    from safetensors.torch import load_file

    given.part("parity", "cpu")
    ours = given.part("parity")
    for family in ours["families"]:
        for dtype in ours["dtypes"]:
            cpu, gpu = (given.folder / device / f"{family} {dtype}" for device in ("cpu", given.device))
            steps, expected = (json.loads(path.with_suffix(".json").read_text()) for path in (gpu, cpu))
            largest = max(
                abs(mine[name] - value) / abs(value)
                for mine, right in zip(steps, expected, strict=True)
                for name, value in right.items()
            )
            weights, right_weights = (load_file(path.with_suffix(".safetensors")) for path in (gpu, cpu))
            for name, tensor in weights.items():
                right = right_weights[name].double()
                largest = max(largest, float((tensor.double() - right).norm() / right.norm()))
            yield Line(
                check="parity",
                what=f"{family}, {dtype}: largest relative difference from the CPU",
                found=f"{largest:.1e}",
                wanted=f"{PARITY[dtype]:.0e}",
                ok=largest <= PARITY[dtype],
            )


def check_attention(given: Given) -> Iterator[Line]:
    """Compares the attention kernel with a dense mask."""
    found = given.part("attention")
    how = "compiled FlexAttention" if found["compiled"] else "blocks of FlexAttention, not compiled"
    for dtype, bound in ATTENTION.items():
        for part in ("output", "query", "key", "value"):
            value = found[f"{dtype} {part}"]
            name = part if part == "output" else f"gradient of {part}"
            yield Line(
                check="attention",
                what=f"{dtype}, {name} over {found['rows']} rows ({how})",
                found=f"{value:.1e}",
                wanted=f"{bound:.0e}",
                ok=value <= bound,
            )
        yield Line(check="attention", what=f"{dtype}, forward and backward", found=f"{found[f'{dtype} ms']:.1f} ms")


def check_gap(given: Given) -> Iterator[Line]:
    """Attributes the difference of log-probs between bfloat16 and float32."""
    import numpy as np

    for device in ("cpu", given.device):
        given.part("gap", device)
        with np.load(given.folder / f"gap-{device}.npz") as arrays:
            exact = arrays["float32"]
            for name in arrays.files:
                if name != "float32":
                    difference = np.abs(arrays[name] - exact)[exact != 0]
                    found = f"mean {difference.mean():.1e}, largest {difference.max():.1e}"
                    yield Line(check="gap", what=f"{device}, {name}, against float32 there", found=found)


def check_offload(given: Given) -> Iterator[Line]:
    """Checks that training continues bit by bit after an offload."""
    for name, found in given.part("offload").items():
        yield Line(
            check="offload",
            what=f"{name}: metrics, export and checkpoint; bytes left of {found['bytes']:,}",
            found=f"{'equal' if found['equal'] else 'different'}, {found['left']}",
            wanted="equal, 0",
            ok=found["equal"] and found["left"] == 0,
        )


def check_sizes(given: Given) -> Iterator[Line]:
    """Compares memory and seconds of real sizes with the plan."""
    from relax_core.config.compose import compose, typed_config
    from relax_core.plan.gpu_models import GPU_MODELS, find_gpu_model
    from relax_core.plan.memory_terms import adam_bytes, states_leave_gpu
    from relax_core.plan.model_dimensions import find_dimensions
    from relax_core.plan.step_time import Rows, pass_flops, pass_seconds

    gpu_name = find_gpu_model(machine()["gpu"])
    for preset, found in given.part("sizes").items():
        seconds = min(found["seconds"][-2:])
        rows = Rows(**found["work"])
        speed = f"{seconds:.2f} s, {rows.head / seconds:,.0f} trained tokens/s"
        if "allocated" not in found:
            yield Line(check="sizes", what=f"{preset}, a train step", found=speed)
            continue
        planned = found["planned"]
        share = found["allocated"] / planned - 1
        yield Line(
            check="sizes",
            what=f"{preset}, peak of allocated memory against {planned / 2**30:.1f} GiB of the plan",
            found=f"{found['allocated'] / 2**30:.1f} GiB ({share:+.1%})",
            wanted=f"{MEMORY:.0%}",
            ok=abs(share) <= MEMORY,
        )
        others = f"{found['reserved'] / 2**30:.1f} GiB, {found['process'] / 2**30:.1f} GiB"
        yield Line(check="sizes", what=f"{preset}, reserved memory, and memory of the process", found=others)
        yield Line(
            check="sizes",
            what=f"{preset}, memory that stays on the GPU after an offload",
            found=f"{found['left'] / 2**30:.3f} GiB",
            wanted="0.1 GiB",
            ok=found["left"] <= LEFT_BYTES,
        )
        moves = f"{found['offload_s']:.2f} s, {found['onload_s']:.2f} s"
        yield Line(check="sizes", what=f"{preset}, offload and return", found=moves)
        if gpu_name is None:
            yield Line(check="sizes", what=f"{preset}, a train step", found=speed)
            continue
        config, gpu = typed_config(compose([f"experiment={preset}"])), GPU_MODELS[gpu_name]
        model, one = find_dimensions(config), config.parallel
        copied = adam_bytes(config, one, model) if states_leave_gpu(config) else 0
        guess = pass_seconds(
            model, gpu, one, rows, gpus_per_node=1, trained=True, recompute=True, host_states=copied
        ).total
        of_peak = pass_flops(model, rows, trained=True, recompute=True) / seconds / gpu.flops
        yield Line(
            check="sizes",
            what=f"{preset}, a train step against {guess:.2f} s of the plan",
            found=f"{speed}, {of_peak:.0%} of peak ({seconds / guess - 1:+.0%})",
        )


def _run_words(given: Given) -> list[str]:
    words = [f"run.steps={RUN_STEPS}", "eval.every=0", "run.export_hf=false", "run.max_restarts=5"]
    if given.device == CUDA:
        memory = f"placement.gpu_memory_gib={machine()['memory_gib'] * 0.99:.1f}"
        words += ["placement=gpu", "placement.gpu=null", memory, "placement.gpus_per_node=1"]
        words += ["+placement.roles.actor=1", "engine=embedded"]
    return words


def _finished(given: Given, name: str, *words: str, kill: str | None = None) -> Any:
    """Runs Relax to its end, and kills the process of a kind in step `KILLED_AT`. Raises PartFailed."""
    from benchmarks.chaos_runs import Training, find_process
    from tests.integration.live_run import LiveRun

    folder, deadline = given.folder / name, time.monotonic() + given.left(RUN_S)
    environment = {} if given.device == CUDA else {"RELAX_TRAIN_DEVICE": given.device}
    with LiveRun(folder, *_run_words(given), *words, environment=environment) as live:
        try:
            training = Training(folder)
            while kill is not None and training.newest() < KILLED_AT:
                if not live.running() or time.monotonic() > deadline:
                    raise PartFailed(f"no step {KILLED_AT}: {live.output()[-800:]}")
                time.sleep(0.1)
            if kill is not None:
                os.kill(find_process(live, kill), signal.SIGKILL)
            finished = live.finish(deadline_s=max(1.0, deadline - time.monotonic()))
        except (AssertionError, TimeoutError) as error:
            raise PartFailed(str(error)[-800:]) from error
    if finished.code:
        raise PartFailed(f"exit code {finished.code}: {finished.output[-800:]}")
    return finished


def check_run(given: Given) -> Iterator[Line]:
    """Runs the demo with the trainer on the device."""
    yield from _run_lines("run", _finished(given, "run"))


def _run_lines(check: str, finished: Any) -> Iterator[Line]:
    summary = finished.summary
    gap, ledger = summary["logprob_gap"]["max"], summary["ledger"]
    lost = f"{ledger['trained']} trained, {ledger['lost']} lost, {ledger['trained_twice']} twice"
    yield Line(
        check=check,
        what=f"{RUN_STEPS} steps: largest log-prob gap in float32",
        found=f"{gap:.1e}",
        wanted=f"{GAP:.0e}",
        ok=gap <= GAP,
    )
    whole = not ledger["lost"] and not ledger["trained_twice"]
    yield Line(check=check, what="samples", found=lost, wanted="0 lost, 0 twice", ok=whole)


def check_colocate(given: Given) -> Iterator[Line]:
    """Runs trainer and engine alternately, on a GPU with SGLang. The trainer computes the reference's log-probs."""
    words = ["algo.kl_coef=0.01", "algo.old_logprobs=actor_fwd"]
    if given.device != CUDA:
        words += ["mode=colocate", "placement.forward=actor"]
    else:
        words += ["placement=one_gpu", f"engine.python={sys.executable}"]
    yield from _run_lines("colocate", _finished(given, "colocate", *words))


def check_killed(given: Given) -> Iterator[Line]:
    """Kills the trainer of a run."""
    finished = _finished(given, "killed", kill="actor_rank_0")
    noticed = "tier " in finished.output
    yield Line(check="killed", what="recovery of the killed trainer", found=str(noticed), wanted="True", ok=noticed)
    yield from _run_lines("killed", finished)


CHECKS: Mapping[str, Callable[[Given], Iterator[Line]]] = {
    "parity": check_parity,
    "attention": check_attention,
    "gap": check_gap,
    "offload": check_offload,
    "sizes": check_sizes,
    "run": check_run,
    "killed": check_killed,
    "colocate": check_colocate,
}


NEEDS = {"run": "ray", "killed": "ray", "colocate": "ray"}  # check → package


def missing_package(name: str, device: str) -> str | None:
    """Returns the package without which a check cannot run, None if it is there."""
    needed = [NEEDS[name]] if name in NEEDS else []
    if name == "colocate" and device == CUDA:
        needed.append("sglang")
    return next((package for package in needed if importlib.util.find_spec(package) is None), None)


def machine() -> dict[str, Any]:
    """Returns the GPU, its memory in GiB, and the versions of the driver and torch."""
    import torch

    found: dict[str, Any] = {"gpu": "none", "gpus": 0, "memory_gib": 0.0, "torch": torch.__version__}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpus": torch.cuda.device_count(), "cuda": torch.version.cuda}
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
    return found


def run_checks(given: Given, names: Sequence[str]) -> list[Line]:
    """Returns the lines of the checks; a check without a result has a line that failed."""
    lines: list[Line] = []
    try:
        given.part("models", "cpu")
    except PartFailed as error:
        lines.append(Line(check="models", what="tiny models of all parts", found=str(error), wanted="made", ok=False))
        print(_text(lines[-1]), flush=True)
        return lines
    for name in names:
        began = time.monotonic()
        if (package := missing_package(name, given.device)) is not None:
            lines.append(Line(check=name, what="the run", found=f"not run: {package} is not installed"))
            print(_text(lines[-1]), flush=True)
            continue
        try:
            for line in CHECKS[name](given):
                lines.append(line)
                print(_text(line), flush=True)
        except PartFailed as error:
            lines.append(Line(check=name, what="result", found=str(error), wanted="a result", ok=False))
            print(_text(lines[-1]), flush=True)
        print(f"{name} took {time.monotonic() - began:.0f} s", flush=True)
    return lines


def _text(line: Line) -> str:
    mark = {True: "ok", False: "FAILED", None: "  "}[line.ok]
    wanted = f" (bound: {line.wanted})" if line.wanted else ""
    return f"{mark:7}{line.check}: {line.what}: {line.found}{wanted}"


def report(lines: Sequence[Line], of: Mapping[str, Any], *, device: str, seconds: float) -> dict[str, Any]:
    """Returns the report in the form of benchmarks/results/."""
    failed = sum(line.ok is False for line in lines)
    bounded = sum(line.ok is not None for line in lines)
    where = f"{of['gpu']}, {of['memory_gib']} GiB, torch {of['torch']}" if device == CUDA else "CPU tensors, no GPU"
    return {
        "title": "GPU check",
        "command": "make gpu-check",
        "date": datetime.date.today().isoformat(),
        "summary": f"{where}: {bounded - failed} of {bounded} bounds hold, {seconds:.0f} s.",
        "columns": ["Check", "What", "Found", "Bound", "Holds"],
        "rows": [
            [line.check, line.what, line.found, line.wanted, {True: "yes", False: "no", None: ""}[line.ok]]
            for line in lines
        ],
        "notes": [f"Device `{device}`. {json.dumps(dict(of))}"],
    }


def _markdown(result: Mapping[str, Any]) -> str:
    rows = [result["columns"], ["---"] * len(result["columns"]), *result["rows"]]
    table = ["| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(
        [f"# {result['title']}, {result['date']}", "", result["summary"], "", *table, "", *result["notes"]]
    )


def main() -> int:
    """Runs the checks and writes the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=(CUDA, ON_CPU), default=CUDA, help="cuda, or a test of this command")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), help="checks to run")
    parser.add_argument("--report", type=Path, default=Path("gpu_check"), help="folder of the report")
    arguments = parser.parse_args()
    of = machine()
    if arguments.device == CUDA and not of["gpus"]:
        parser.error(
            f"--device=cuda: torch {of['torch']} finds no GPU. Run it on a machine with an NVIDIA GPU and a torch for "
            f"its driver, or test the command itself with --device={ON_CPU}."
        )
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="relax-gpu-check-") as name:
        given = Given(device=arguments.device, folder=Path(name), until=began + TOTAL_S)
        lines = run_checks(given, arguments.only)
    result = report(lines, of, device=arguments.device, seconds=time.monotonic() - began)
    arguments.report.mkdir(parents=True, exist_ok=True)
    content = json.dumps({**result, "lines": [asdict(line) for line in lines]}, indent=2, ensure_ascii=False)
    (arguments.report / "gpu_check.json").write_text(content + "\n", encoding="utf-8")
    (arguments.report / "gpu_check.md").write_text(_markdown(result) + "\n", encoding="utf-8")
    print(result["summary"], f"Report: {arguments.report}/gpu_check.md", sep="\n")
    return int(any(line.ok is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
