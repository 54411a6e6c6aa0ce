"""Executes plan=true, plan=json and plan=rehearse, and makes the plan before every run."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from relax_core.config.choices import LauncherKind
from relax_core.config.errors import ConfigError, NotYet
from relax_core.config.schema import RelaxConfig
from relax_core.control.resume import find_resume_point
from relax_core.plan.build_plan import Plan, as_json_values, as_text, make_plan
from relax_core.plan.rehearse import Rehearsal, rehearse
from relax_core.plan.rehearse import as_json_values as rehearsal_values
from relax_core.plan.rehearse import as_text as rehearsal_text
from relax_core.plan.unused_keys import warn_of_unused
from relax_core.server.order_types import PLAN_FILE

CANNOT_WORK = 1
REHEARSALS = ("rehearse", "rehearse_json")


def show_plan(config: RelaxConfig, problems: Sequence[str], *, overrides: Sequence[str] = ()) -> int:
    """Prints the plan, and returns the exit code. ``problems`` are the problems that the start checks found.

    Overrides that nothing reads get a warning. The code is 0 for a layout that works, also if it cannot start yet; the
    plan then says so first. It is 1 for a layout that cannot work; the plan then has the fixes. With plan=rehearse the
    actor is rehearsed instead, and the code is 1 if it does not fit on its GPUs.
    """
    mistakes = [problem for problem in problems if not isinstance(problem, NotYet)]
    rehearsal: Rehearsal | None = None
    if not mistakes:
        try:
            plan = _with_resume(make_plan(config, problems), config)
            if config.plan in REHEARSALS:
                rehearsal = rehearse(config, plan)
        except (ValueError, OSError) as error:
            mistakes = [str(error)]
    if mistakes:
        if config.plan in ("json", "rehearse_json"):
            print(json.dumps({"refused": mistakes, "can_work": False, "can_start": False}, indent=2))
        print(ConfigError(mistakes).report(), file=sys.stderr)
        return CANNOT_WORK
    warn_of_unused(plan.unread, overrides)
    if rehearsal is not None:
        as_json = config.plan == "rehearse_json"
        print(json.dumps(rehearsal_values(rehearsal), indent=2) if as_json else rehearsal_text(rehearsal))
        return 0 if rehearsal.fits else CANNOT_WORK
    print(json.dumps(as_json_values(plan), indent=2) if config.plan == "json" else as_text(plan))
    return CANNOT_WORK if plan.refused else 0


def _with_resume(plan: Plan, config: RelaxConfig) -> Plan:
    """Returns the plan with notes about the checkpoint to resume from. Raises the errors of `find_resume_point`."""
    resume = None if config.launcher.name is LauncherKind.ray_job else find_resume_point(config, repair=False)
    if resume is None:
        return plan
    notes = [f"resume: {resume.folder}, step {resume.step}", *(f"resume: {note}" for note in resume.notes)]
    return dataclasses.replace(plan, warnings=[*plan.warnings, *notes])


def plan_run(config: RelaxConfig) -> Plan:
    """Returns the plan of a run that is about to start. Raises `ConfigError` if the run cannot work."""
    try:
        plan = make_plan(config)
    except ValueError as error:
        raise ConfigError([str(error)]) from error
    if plan.refused:
        raise ConfigError(plan.refused)
    return plan


def save_plan(plan: Plan, folder: Path) -> None:
    """Writes plan.json atomically and replaces the file of an earlier start."""
    partial = folder / f".{PLAN_FILE}.partial"
    partial.write_text(json.dumps(as_json_values(plan), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, folder / PLAN_FILE)
