"""What `python -m relax_core --help` prints; options and their one-liners come from conf/."""

from __future__ import annotations

from relax_core.config.options import conf_folder, groups, plugin_options, yaml_options
from relax_core.registry import KINDS, known

_HEAD = """\
Relax: reinforcement-learning post-training of language models.

  python -m relax_core [group=option ...] [key=value ...]

Examples
  python -m relax_core                                       the demo: a tiny model learns to reverse digits
  python -m relax_core mode=colocate run.steps=60 seed=1     strict on-policy, another seed
  python -m relax_core data=file data.path=train.jsonl reward=math model=qwen3 model.path=/models/Qwen3-0.6B
  python -m relax_core -m mode.max_staleness=0,1,4           three runs, one after another

Groups (the default is marked *)
"""

_KEYS = """
Keys that everyone types
  seed                     of data order, sampling and trainer
  run.steps                train steps
  run.dir                  the run's folder
  resume                   auto, or a checkpoint's folder
  optimizer.lr             learning rate
  algo.group_size          samples a prompt
  rollout.prompts_per_step prompts a train step
  rollout.max_new_tokens   response tokens at most
  rollout.temperature      of sampling
  mode.max_staleness       weight versions that a trained token may lag behind
  parallel.dp              data-parallel trainer ranks
  model.path, data.path    a Hugging Face folder; a .jsonl or .parquet file
  eval.every               train steps between greedy evaluations

Flags
  --cfg job                print the whole configuration and stop
  -m, --multirun           run every combination of comma-separated values, one after another
  --hydra-help             Hydra's own flags

Every key is explained beside its value in conf/. A plug-in of your own: algo.name=/path/my_algo.py (CONTRIBUTING.md).
"""


def help_text() -> str:
    """The whole help page."""
    from omegaconf import OmegaConf

    defaults: dict[str, str] = {}
    for entry in OmegaConf.load(conf_folder() / "config.yaml").defaults:
        if not isinstance(entry, str):
            defaults.update({str(key): str(value) for key, value in entry.items()})
    lines = []
    for group in groups():
        lines.append(f"  {group}")
        for option in yaml_options(group):
            mark = "*" if defaults.get(group) == option else " "
            lines.append(f"   {mark} {option:<15} {_first_comment(group, option)}")
        for kind in KINDS:
            if kind == group and (options := plugin_options(group)):
                summaries = known(kind)
                lines += [f"     {option:<15} {summaries[option]}" for option in options]
    return _HEAD + "\n".join(lines) + "\n" + _KEYS


def _first_comment(group: str, option: str) -> str:
    """The option's first comment, Hydra's own directives aside."""
    text = (conf_folder() / group / f"{option}.yaml").read_text(encoding="utf-8")
    comments = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    return next(comment for comment in comments if not comment.startswith("@package"))
