"""Orders the prompts that wait for slots: those that go on from what is computed stand before new ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from relax_core.engines.embedded.scheduler.calls import Call, Sample, Waiting


class WaitingQueue:
    """Holds the prompts that wait for slots or for a weight version, in the order in which they are taken.

    A retracted sample comes first. Then come the prompts that go on from a kept prefix, such as the next turn of an
    episode, so that its prefix is not dropped while it waits; then all others. Each kind stands in order of arrival.
    """

    def __init__(self) -> None:
        self._groups: list[Waiting] = []

    def add(self, groups: Sequence[Waiting], *, goes_on: Callable[[Waiting], bool]) -> None:
        """Appends prompts that have arrived; ``goes_on`` says which of them go on from a kept prefix."""
        for group in groups:
            group.goes_on = goes_on(group)
        self._groups = sorted([*self._groups, *groups], key=lambda group: not group.goes_on)

    def put_back(self, groups: Sequence[Waiting]) -> None:
        """Puts prompts at the head of the queue."""
        for group in groups:
            group.goes_on = True
        self._groups = [*groups, *self._groups]

    def is_ready(self, version: int) -> bool:
        """Is True if a prompt waits that may run under weights ``version``."""
        return any(group.prompt.min_version <= version for group in self._groups)

    def take(self, version: int, *, fits: Callable[[int, int], bool]) -> list[Waiting]:
        """Removes and returns the first prompts that may run under weights ``version``, as many as fit.

        ``fits(samples, columns)`` says whether so many more samples can run, the longest of which needs ``columns``.
        """
        taken: list[Waiting] = []
        held: list[Waiting] = []
        samples = columns = seen = 0
        for group in self._groups:
            if group.prompt.min_version > version:
                held.append(group)
            else:
                samples += len(group.samples)
                columns = max(columns, len(group.prompt.token_ids) + group.prompt.settings.max_new_tokens)
                if not fits(samples, columns):
                    break
                taken.append(group)
            seen += 1
        if taken:
            self._groups = held + self._groups[seen:]
        return taken

    def remove(self, chosen: Callable[[Sample], bool]) -> list[Sample]:
        """Removes and returns the samples that ``chosen`` selects."""
        removed: list[Sample] = []
        for group in self._groups:
            removed += [sample for sample in group.samples if chosen(sample)]
            group.samples = [sample for sample in group.samples if not chosen(sample)]
        self._groups = [group for group in self._groups if group.samples]
        return removed

    def drop(self, calls: Collection[Call]) -> None:
        """Removes the prompts of these calls."""
        self._groups = [group for group in self._groups if group.prompt.call not in calls]

    def counts(self, version: int) -> tuple[int, int]:
        """Returns how many samples wait for slots, and how many for a newer weight version than ``version``."""
        held = sum(len(group.samples) for group in self._groups if group.prompt.min_version > version)
        return sum(len(group.samples) for group in self._groups) - held, held
