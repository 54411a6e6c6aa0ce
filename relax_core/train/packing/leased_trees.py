"""From leased bus rows to the trainer's trees."""

from __future__ import annotations

from relax_core.contracts.bus import LeasedRow
from relax_core.contracts.columns import decode_tree
from relax_core.contracts.tree import TRUNCATED, TokenTree


def decode_train_tree(row: LeasedRow, *, step: int, oldest_version: int) -> tuple[TokenTree, dict[str, str]]:
    """A row as the trainer sees it at ``step``, and the uids of which no token is trained, with the ledger's reason.

    Rows older than ``oldest_version`` are masked (mode.on_stale=mask; with drop the bus never hands such a row out).
    An episode that comes without a trained token was truncated (rollout.mask_truncated). The extra ``on_policy`` is
    True where a token's whole episode came from the very weights that the step starts with: there rollout and trainer
    must agree to rounding, while later tokens attend to what older weights left in the engine's cache.
    """
    tree = decode_tree(row)
    masked = dict.fromkeys(_untrained(tree), TRUNCATED)
    on_policy = tree.oldest_versions(trained=False) == step
    if min(row.versions) < oldest_version:
        tree = tree.with_loss_mask(tree.loss_mask & (tree.versions >= oldest_version))
        masked = dict.fromkeys(_untrained(tree), "stale") | masked
    return tree.with_extras(on_policy=on_policy[tree.tokens[0]]), masked


def _untrained(tree: TokenTree) -> list[str]:
    """The uids of episodes without a trained token."""
    return [one.uid for one, trained in zip(tree.episodes, tree.trained_episodes(), strict=True) if not trained]
