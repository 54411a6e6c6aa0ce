"""What `python -m relax_core --help` prints; options and their one-liners come from conf/."""

from __future__ import annotations

from relax_core.config.options import conf_folder, first_comment, groups, plugin_options, yaml_options
from relax_core.registry import KINDS, known

_HEAD = """\
Relax: reinforcement-learning post-training of language models.

  python -m relax_core [group=option ...] [key=value ...]

Examples
  python -m relax_core                                       the demo: a tiny model learns to reverse digits
  python -m relax_core mode=colocate run.steps=60 seed=1     strict on-policy, another seed
  python -m relax_core data=file data.path=train.jsonl reward=math model=qwen3 model.path=/models/Qwen3-0.6B
  python -m relax_core -m mode.max_staleness=0,1,4           three runs, one after another
  python -m relax_core plan=true experiment=qwen3_4b_async_8gpu   what would run, where, in how much memory

Commands (relax is python -m relax_core)
  relax list [FILE.py ...]  algorithms, rewards, envs, models; your own files with their kind
  relax doctor [--clean]    whether a run could work on this machine, and what killed runs left on it (removes it)

Groups: each is a set of keys that belong together; group=option chooses a file of conf/group (the default is marked *)
"""

_GROUPS = {
    "algo": "how samples become a gradient",
    "bus": "what carries samples between the roles",
    "data": "where prompts come from",
    "engine": "what generates",
    "env": "what a sample does between prompt and reward",
    "experiment": "settings of several groups under one name; what you type beside it wins",
    "launcher": "where the run is started",
    "modality": "what goes into the model beside text",
    "mode": "whether rollout and trainer take turns, and how old a trained token may be",
    "model": "what learns",
    "parallel": "how the trainer is cut into ranks and micro-batches",
    "placement": "which role is on which GPU",
    "reward": "how an answer is scored",
    "tracker": "where metrics go",
}

_KEYS = """
Keys that everyone types
  seed                     of data order, sampling and trainer
  run.steps                train steps
  run.dir                  the run's folder
  resume                   auto, or a checkpoint's folder
  plan                     true: print what would run and stop | json: the same for a program
  optimizer.lr             learning rate
  algo.group_size          samples a prompt
  rollout.prompts_per_step prompts a train step
  rollout.max_new_tokens   response tokens at most
  rollout.temperature      of sampling
  mode.max_staleness       weight versions that a trained token may lag behind
  parallel.dp, .tp, .pp …  how many trainer ranks, and what each holds; or a layout by name: parallel=tp2
  model.path, data.path    a Hugging Face folder; a .jsonl or .parquet file
  eval.every               train steps between greedy evaluations

Flags
  --cfg job                print the whole configuration and stop
  -m, --multirun           run every combination of comma-separated values, one after another
  --hydra-help             Hydra's own flags

Completion with the tab key: put this line into ~/.bashrc (for other shells: install=zsh, install=fish)
  eval "$(relax -sc install=bash)"

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
        lines.append(f"  {group:<18} {_GROUPS[group]}")
        width = max(15, *map(len, yaml_options(group)))
        for option in yaml_options(group):
            mark = "*" if defaults.get(group) == option else " "
            lines.append(f"   {mark} {option:<{width}} {first_comment(group, option)}")
        for kind in KINDS:
            if kind == group and (options := plugin_options(group)):
                summaries = known(kind)
                lines += [f"     {option:<{width}} {summaries[option]}" for option in options]
    return _HEAD + "\n".join(lines) + "\n" + _KEYS
