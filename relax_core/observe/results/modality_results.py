"""Sums up what became of the prompts of each modality, and finds those that are trained less than they were issued."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relax_core.config.modality_shares import TEXT
from relax_core.contracts.bus import ModalityCounts

Values = Mapping[str, float]
MOST_POINTS = 0.02  # difference of a modality's shares of the issued and of the trained samples
PREFIX = "modality/"


def modality_results(
    counts: Mapping[str, ModalityCounts], actor: Sequence[Values], prompt_batches: Sequence[Values]
) -> dict[str, Any]:
    """Returns the figures of each modality; none for a run that issued text alone.

    ``issued_share`` is the share of all samples that have an end, and ``trained_share`` that of all trained ones.
    """
    if set(counts) <= {TEXT}:
        return {}
    ended = sum(one.issued - one.open for one in counts.values())
    trained = sum(one.trained for one in counts.values())
    return {
        name: {
            "issued": one.issued,
            "trained": one.trained,
            "dropped": dict(one.dropped),
            "open": one.open,
            "issued_share": (one.issued - one.open) / ended if ended else None,
            "trained_share": one.trained / trained if trained else None,
            "reward": _mean(actor, f"{PREFIX}{name}/reward", f"{PREFIX}{name}/samples"),
            "staleness": {str(staleness): count for staleness, count in sorted(one.staleness.items())},
            "encode_ms": _mean(prompt_batches, f"{PREFIX}{name}/encode_ms", f"{PREFIX}{name}/encode_prompts"),
            "prefill_ms": _mean(prompt_batches, f"{PREFIX}{name}/prefill_ms", f"{PREFIX}{name}/prefill_prompts"),
        }
        for name, one in counts.items()
    }


def unfair_shares(modalities: Mapping[str, Any]) -> Iterator[str]:
    """Returns a sentence for each modality whose share of the trained samples differs from that of the issued ones."""
    for name, one in modalities.items():
        issued, trained = one["issued_share"], one["trained_share"]
        if issued is None or trained is None or abs(trained - issued) <= MOST_POINTS:
            continue
        why = ", ".join(f"{count:,} {reason}" for reason, count in one["dropped"].items()) or "none"
        yield (
            f"Modality {name} is {issued:.1%} of the issued samples and {trained:.1%} of the trained ones (dropped: "
            f"{why}). data.mix keeps its share."
        )


def _mean(records: Sequence[Values], name: str, weight: str) -> float | None:
    """Returns the mean of a figure over all records, each weighted by the samples or prompts behind it."""
    known = [(values[name], values[weight]) for values in records if name in values]
    return sum(value * count for value, count in known) / sum(count for _, count in known) if known else None
