"""Checks before the start whether a run's reward gives points to wrong answers (``reward.audit``).

The user's cache stores the result, because a sweep starts many runs with the same reward and rows.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from relax_core.config.reward_choice import RewardChoice
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.data import DataRow, PromptSource
from relax_core.contracts.private_folder import CACHE_KEY, private_folder, user_cache
from relax_core.contracts.reward import OFF, REFUSE, REPORT
from relax_core.contracts.untrusted_files import read_regular
from relax_core.registry import builtin_folder, find_reward, is_file_plugin
from relax_core.rollout import rewards
from relax_core.rollout.episodes.episode_records import without_bytes
from relax_core.rollout.rewards.reward_audit import audited_rows
from relax_core.rollout.trial.reward_trial import Audited, audit_in_child

ROWS = 24  # number of rows to check before a run; relax check-reward checks more
LIMIT_S = 8.0  # seconds after which the check starts no further row
NAMED = 3  # maximum number of families of wrong answers in a note
NOT_CHECKED = "The reward was not checked for wrong answers that it awards:"
_MAX_RECORD_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RewardCheck:
    """Holds notes about the reward for the user; ``refused`` is the reason why the run cannot start."""

    notes: Sequence[str] = ()
    refused: str | None = None


def check_reward(config: RelaxConfig, source: PromptSource) -> RewardCheck:
    """Returns the result of the check; if the cache has a result for this reward and these rows, returns that result.

    If a reward cannot be checked, a note has the reason. Rewards that score the turns of an environment are not
    checked.
    """
    reward = config.reward
    if reward.audit == OFF or find_reward(reward.name).scores_turns or not len(source):
        return RewardCheck()
    rows = list(audited_rows(source, most=ROWS))
    if not rows:
        return RewardCheck(notes=[f"{NOT_CHECKED} no checked row has a prompt and a label."])
    found = _kept_or_made(config, rows)
    if found.why_not:
        return RewardCheck(notes=[f"{NOT_CHECKED} {found.why_not}"])
    above = {name: family for name, family in found.families.items() if family[0] > reward.audit_limit}
    if not above:
        return RewardCheck()
    named = [f"{name} ({share:.0%} of {found.rows} rows): {worst}" for name, (share, worst) in above.items()]
    fix = "Use a stricter reward; relax check-reward with the same arguments shows all families (docs/rewards.md)."
    if reward.audit == REFUSE:
        text = f"reward.audit=refuse: reward={reward.name} awards wrong answers, and a model learns them. "
        return RewardCheck(refused=f"{text}{'; '.join(named[:NAMED])}. {fix}")
    text = f"reward={reward.name} awards wrong answers of {len(above)} families, which a model learns. {fix} The first:"
    return RewardCheck(notes=[text, *(f"  {example}" for example in named[:NAMED])])


def _kept_or_made(config: RelaxConfig, rows: Sequence[DataRow]) -> Audited:
    file = user_cache("audits") / f"{_key(config, rows)}.json"
    if file.exists():
        try:
            return msgspec.json.decode(read_regular(file, max_bytes=_MAX_RECORD_BYTES), type=Audited)
        except (ValueError, OSError):
            pass  # A damaged file is replaced.
    known = RewardChoice(find_reward(config.reward.name), config.reward).known()
    asking = [reward.label for reward in known if reward.spec.is_async]
    if asking:
        return Audited(why_not=f"reward={asking[0]} queries a server. Start the server and use relax check-reward.")
    found = audit_in_child(config.reward, rows, workers=config.rollout.reward_workers, limit_s=LIMIT_S)
    if found.crashed:
        return found
    private_folder(file.parent, key=CACHE_KEY)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_bytes(msgspec.json.encode(found))
    os.replace(partial, file)
    return found


def _key(config: RelaxConfig, rows: Sequence[DataRow]) -> str:
    """Returns a digest of the settings, the rows, and the code of the rewards and of the check."""
    settings = replace(config.reward, audit=OFF, audit_limit=0.0, shadow=None, on_hack=REPORT)
    digest = hashlib.sha256(repr(settings).encode())
    digest.update(repr([sorted(row.items()) for row in map(_plain, rows)]).encode())
    folders = [builtin_folder("reward"), *map(Path, rewards.__path__)]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    plugins = [config.reward.name, *(str(part.get("reward")) for part in config.reward.parts)]
    files += [Path(name) for name in plugins if is_file_plugin(name)]
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _plain(row: DataRow) -> Mapping[str, object]:
    found: Mapping[str, object] = without_bytes(row)
    return found
