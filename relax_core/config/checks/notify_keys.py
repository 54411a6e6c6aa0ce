"""What `notify` cannot tell: unknown events and rules that are none."""

from __future__ import annotations

from collections.abc import Iterator

from relax_core.config.notify_rules import read_rules
from relax_core.config.schema import RelaxConfig
from relax_core.config.sections.notify_schema import EVENTS


def notify_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a sentence for each problem of `notify`; the file of addresses is looked at before the start."""
    for event in config.notify.events:
        if event not in EVENTS:
            yield f"notify.events has {event!r}, which is no event. Choose of {', '.join(EVENTS)}."
    for rule in config.notify.rules:
        try:
            read_rules([rule])
        except ValueError as error:
            yield f"notify.rules: {error}."
