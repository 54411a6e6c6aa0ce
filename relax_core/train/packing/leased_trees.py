"""Decodes a leased group into the tree that the trainer works on."""

from __future__ import annotations

from relax_core.contracts.bus import LeasedGroup
from relax_core.contracts.columns import decode_tree
from relax_core.contracts.tree import TRUNCATED, TokenTree


def decode_train_tree(group: LeasedGroup, *, step: int, oldest_version: int) -> tuple[TokenTree, dict[str, str]]:
    """Returns the tree for train step ``step``, and the uid and ledger reason of each episode that is not trained.

    Tokens older than ``oldest_version`` are masked (mode.on_stale=mask; with drop the bus never leases such a group).
    An episode that arrives without a trained token was truncated (rollout.mask_truncated). The extra ``on_policy`` is
    True for tokens whose whole episode was sampled with the weights that the step starts with. Rollout and trainer
    agree to rounding there. Other tokens attend to cache entries that older weights left in the engine.
    """
    tree = decode_tree(group)
    masked = dict.fromkeys(_untrained(tree), TRUNCATED)
    on_policy = tree.oldest_versions(trained=False) == step
    if min(group.versions) < oldest_version:
        tree = tree.with_loss_mask(tree.loss_mask & (tree.versions >= oldest_version))
        masked = dict.fromkeys(_untrained(tree), "stale") | masked
    return tree.with_extras(on_policy=on_policy[tree.tokens[0]]), masked


def _untrained(tree: TokenTree) -> list[str]:
    """Returns the uids of episodes without a trained token."""
    return [one.uid for one, trained in zip(tree.episodes, tree.trained_episodes(), strict=True) if not trained]
