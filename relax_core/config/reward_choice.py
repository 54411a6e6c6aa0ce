"""Chooses the rewards that score a data row: the run's reward, the reward that the row names, or parts of a sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from relax_core.config.plugin_types import plugin_config
from relax_core.contracts.data import BadRow, DataRow
from relax_core.contracts.reward import (
    AUTO,
    MAX_WHY,
    REPORT,
    SHADOW,
    RewardConfig,
    RewardInput,
    RewardOutput,
    RewardPart,
    RewardSpec,
    reward_part,
    reward_parts,
)
from relax_core.registry import PluginError, find_reward, is_file_plugin, plugin_error_text
from relax_core.sandbox.worker_sandbox import worker_refusal

Outcome = tuple[RewardOutput, Exception | None]  # the reward's output, and the exception that it raised


@dataclass(frozen=True, eq=False)
class ChosenReward:
    """Holds a reward with its settings; ``label`` is its name in metrics and messages."""

    label: str
    spec: RewardSpec
    config: RewardConfig


class RewardChoice:
    """Selects the rewards of data rows from the run's reward settings.

    ``judged`` is the reward that asks judges, or None. ``shadow`` is the shadow reward, or None: it scores the same
    answers independently and is never trained.

    Raises ValueError (key, value, fix) for invalid entries of ``reward.parts``, for an unknown reward or setting in an
    entry, for settings that a part's own check refuses, for two rewards that ask judges, and for a reward that needs a
    missing sandbox. The same error is raised for a shadow reward that is the trained reward, asks judges or scores
    turns.
    """

    def __init__(self, spec: RewardSpec, config: RewardConfig) -> None:
        self.own = ChosenReward(spec.name, spec, config)
        self._by = config.by
        self._sandbox = config.sandbox
        parts = reward_parts(config)
        if spec.combine is not None and not parts:
            raise ValueError(
                f"reward.parts=[]: reward={spec.name} is made of other rewards. Name them: "
                "'reward.parts=[{reward: math, weight: 0.9}, {reward: format_think, weight: 0.1}]'."
            )
        if spec.combine is not None and config.by is not None:
            raise ValueError(
                f"reward.by={config.by} with reward={spec.name}: its parts score every row. Use when=… in the parts "
                "instead of reward.by, or another reward."
            )
        if parts and spec.combine is None and config.by is None:
            raise ValueError(
                f"reward.parts with reward={spec.name}, which is not made of parts. Use reward=mix, or "
                "reward.by=COLUMN."
            )
        self._parts = {part.label: part for part in parts}
        self._rewards = {
            part.label: _of_part(part, where=f"reward.parts[{number}]") for number, part in enumerate(parts)
        }
        self.shadow = self._shadow(config)
        if config.by is not None:
            for part in parts:
                if (part.weight, part.when, part.optional) != (1.0, {}, False):
                    raise ValueError(
                        f"reward.parts: {part.label} has weight, when or optional with reward.by={config.by}, where "
                        "one reward scores a row. Drop them, or use reward=mix."
                    )
        for reward in self.known():
            self._check_sandbox(reward)

        asking = [reward for reward in self.known() if reward.spec.judges is not None]
        if len(asking) > 1:
            raise ValueError(
                f"reward.parts: {' and '.join(reward.label for reward in asking)} ask judges, but only one reward may. "
                "Name all judges in one reward, and let its route choose among them."
            )
        self.judged = asking[0] if asking else None

    def known(self) -> list[ChosenReward]:
        """Returns the rewards that are known without the data, including the shadow reward.

        Data rows may name further rewards.
        """
        return [*self._trained(), *([] if self.shadow is None else [self.shadow])]

    def _trained(self) -> list[ChosenReward]:
        return [*([] if self.own.spec.combine else [self.own]), *self._rewards.values()]

    def _shadow(self, config: RewardConfig) -> ChosenReward | None:
        """Returns the reward in ``config.shadow``.

        Raises ValueError (key, value, fix) if it cannot be a shadow reward.
        """
        entry = config.shadow
        if entry == AUTO:
            entry = next((reward.spec.shadow for reward in self._trained() if reward.spec.shadow), None)
        if entry is None:
            if config.on_hack != REPORT:
                raise ValueError(
                    f"reward.on_hack={config.on_hack}: reward={self.own.spec.name} has no shadow to detect hacks. "
                    "Name one, such as reward.shadow=final_answer, or use reward.on_hack=report."
                )
            return None
        if not isinstance(entry, str | Mapping):
            raise ValueError(f"reward.shadow={entry!r}: write NAME, {{reward: NAME, KEY: VALUE}}, auto or null.")
        part = reward_part({"reward": entry} if isinstance(entry, str) else entry, where="reward.shadow")
        if (part.weight, part.when, part.optional) != (1.0, {}, False):
            raise ValueError("reward.shadow: it has weight, when or optional, which are for parts of a sum. Drop them.")
        shadow = replace(_of_part(part, where="reward.shadow"), label=SHADOW)
        if shadow.spec.judges is not None or shadow.spec.scores_turns:
            raise ValueError(
                f"reward.shadow={part.reward}: a shadow is a rule for one answer, without judges or turns of an env. "
                "Use a rule, such as final_answer."
            )
        if any(reward.spec.name == shadow.spec.name and _own(reward) == _own(shadow) for reward in self._trained()):
            raise ValueError(
                f"reward.shadow={part.reward}: it is the trained reward itself, so it would never differ. Name another "
                "reward, such as final_answer, or null."
            )
        return shadow

    def of_row(self, row: DataRow) -> ChosenReward:
        """Returns the reward of a data row.

        Raises ValueError (column, value, fix) if the row names an unknown reward.
        """
        name = row.get(self._by) if self._by is not None else None
        if name is None or name == "":
            return self.own
        if not isinstance(name, str):
            raise ValueError(f"{self._by}={name!r} is not a name of a reward. Write one, such as math.")
        if name not in self._rewards:
            self._rewards[name] = self._named(name)
        return self._rewards[name]

    def _check_sandbox(self, chosen: ChosenReward) -> None:
        """Raises ValueError if the reward needs a sandbox but the run or the machine has no sandbox."""
        if not chosen.spec.needs_sandbox:
            return
        why = f"reward {chosen.label} runs only in the sandbox, because its library evaluates answers as programs"
        if self._sandbox == "none":
            raise ValueError(f"reward.sandbox=none: {why}. Use reward.sandbox=auto, or another reward.")
        if refusal := worker_refusal():
            raise ValueError(f"reward.sandbox={self._sandbox}: {why}. {refusal[:1].upper()}{refusal[1:]}")

    def _named(self, name: str) -> ChosenReward:
        if name == self.own.label:
            return self.own
        if is_file_plugin(name):
            raise ValueError(
                f"{self._by}={name}: a row cannot name a file, because the file would run as a program. Describe it in "
                f"reward.parts: {{reward: {name}}}."
            )
        try:
            spec = find_reward(name)
        except PluginError as error:
            raise ValueError(f"{self._by}: {error}") from error
        if spec.combine is not None:
            raise ValueError(f"{self._by}={name}: it is made of other rewards. Name one of them in the row.")
        if spec.judges is not None:
            raise ValueError(
                f"{self._by}={name}: its judges start with the run. Describe it in reward.parts: {{reward: {name}, …}}."
            )
        config = plugin_config("reward", name, {}, section="reward")
        try:
            spec.check(config)
        except ValueError as error:
            raise ValueError(
                f"{self._by}={name}: {error} Settings of a row's reward stand in reward.parts: {{reward: {name}, …}}."
            ) from error
        chosen = ChosenReward(name, spec, config)
        self._check_sandbox(chosen)
        return chosen

    def parts_of(self, row: DataRow) -> list[ChosenReward]:
        """Returns the parts of the run's reward that score a data row."""
        return [self._rewards[label] for label, part in self._parts.items() if part.applies(row)]

    def scorers(self, row: DataRow) -> list[ChosenReward]:
        """Returns all rewards that score a data row; raises the errors of `of_row`."""
        chosen = self.of_row(row)
        return self.parts_of(row) if chosen.spec.combine else [chosen]

    def check_row(self, row: DataRow, where: str) -> None:
        """Raises `BadRow` if the row's reward cannot score the row; ``where`` is the row's file and line."""
        try:
            scorers = self.scorers(row)
        except ValueError as error:
            raise BadRow.because("reward", f"{where}: {error}") from error
        for scorer in scorers:
            if scorer.spec.check_row is None:
                continue
            try:
                scorer.spec.check_row(row, scorer.config)
            except ValueError as error:
                raise BadRow.because("label", f"{where}: reward {scorer.label}: {error}") from error
            except Exception as error:  # plug-in code
                raise BadRow.because("label", f"{where}: reward {scorer.label}: {plugin_error_text(error)}") from error

    def combined(self, given: RewardInput, found: Mapping[str, Outcome]) -> Outcome:
        """Combines the outcomes of a row's parts, given by label.

        If a required part has no reward, the outcome has no reward. The outcome lists the rewards of the parts.
        """
        combine = self.own.spec.combine
        assert combine is not None
        outputs = {label: output for label, (output, _) in found.items() if output.reward is not None}
        for label, (output, error) in found.items():
            if output.reward is None and not self._parts[label].optional:
                reason = f"{label}: {output.reason}"
                return RewardOutput(reward=None, reason=reason, why=_why(found)[:MAX_WHY], cause=output.cause), error
        try:
            made = combine(given, outputs, self.own.config)
        except Exception as error:  # plug-in code
            return RewardOutput(reward=None, reason=plugin_error_text(error), cause="raised"), error
        assert isinstance(made, RewardOutput), "the registry checks the result of a reward"
        parts = {name: value for label, output in outputs.items() for name, value in labelled(label, output).items()}
        return replace(made, parts={**parts, **(made.parts or {})}, why=made.why or _why(found)[:MAX_WHY]), None

    def routed(self, chosen: ChosenReward, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Returns the outcomes of a row's reward; if rows name their rewards, each reward is a separate part."""
        if self._by is None:
            return list(outcomes)
        return [
            (output if output.reward is None else replace(output, parts=labelled(chosen.label, output)), error)
            for output, error in outcomes
        ]


def labelled(label: str, output: RewardOutput) -> dict[str, float]:
    """Returns a mapping of LABEL to the reward and of LABEL_PART to each of its parts."""
    assert output.reward is not None
    return {label: output.reward, **{f"{label}_{name}": value for name, value in (output.parts or {}).items()}}


def _own(chosen: ChosenReward) -> dict[str, object]:
    """Returns the settings that are specific to this reward."""
    common = {field.name for field in fields(RewardConfig)}
    return {name: value for name, value in vars(chosen.config).items() if name not in common}


def _of_part(part: RewardPart, *, where: str) -> ChosenReward:
    try:
        spec = find_reward(part.reward)
    except PluginError as error:
        raise ValueError(f"{where}: {error}") from error
    if spec.combine is not None:
        raise ValueError(f"{where}.reward={part.reward}: it is made of parts itself. Name its parts here.")
    if "sandbox" in part.settings:
        raise ValueError(
            f"{where}.sandbox={part.settings['sandbox']}: the rewards of a run share their processes. Set "
            "reward.sandbox instead."
        )
    config = plugin_config("reward", part.reward, dict(part.settings), section=where)
    try:
        spec.check(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return ChosenReward(part.label, spec, config)


def _why(found: Mapping[str, Outcome]) -> str:
    return "; ".join(f"{label}: {output.why}" for label, (output, _) in found.items() if output.why)


def choice_problems(spec: RewardSpec, config: RewardConfig) -> list[str]:
    """Returns the problems of ``reward.by``, ``reward.parts`` and ``reward.shadow``."""
    try:
        RewardChoice(spec, config)
    except ValueError as error:
        return str(error).splitlines()
    return []


def row_check(spec: RewardSpec, config: RewardConfig) -> RewardChoice | None:
    """Returns the `RewardChoice` that checks data rows, or None if rows need no check."""
    choice = RewardChoice(spec, config)
    checks = any(
        reward.spec.check_row is not None or reward.spec.right_answers is not None for reward in choice.known()
    )
    return choice if checks or config.by is not None else None


def judged_reward(config: RewardConfig) -> ChosenReward | None:
    """Returns the reward or part that asks judges, or None; raises the errors of `RewardChoice`."""
    return RewardChoice(find_reward(config.name), config).judged


def may_be_isolated(config: RewardConfig) -> bool:
    """Returns whether a reward of the run may need worker processes.

    With ``reward.by`` data rows may name such a reward.
    """
    known = RewardChoice(find_reward(config.name), config).known()
    return config.by is not None or any(reward.spec.isolated for reward in known)
