"""Names of earlier versions of the contracts, so that an error about an old plug-in says what to write instead."""

from __future__ import annotations

import re

RENAMED = {
    "AlgorithmKnobs": "AlgorithmConfig",
    "RewardKnobs": "RewardConfig",
    "EnvKnobs": "EnvConfig",
    "InteractionKnobs": "InteractionConfig",
    "PolicyGradientKnobs": "PolicyGradientConfig",
    "knobs": "config",
    "Needs": "Requirements",
    "needs": "requirements",
    "group_needs": "group_requirements",
}


def renamed_hint(text: str) -> str:
    """Returns a sentence with the new names of the old names in an error's text, or an empty text."""
    found = dict.fromkeys(word for word in re.findall(r"'(\w+)'", text) if word in RENAMED)
    if not found:
        return ""
    return " Relax renamed " + ", ".join(f"{old} to {RENAMED[old]}" for old in found) + "."
