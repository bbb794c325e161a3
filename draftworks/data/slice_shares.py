"""Shares of slices: how many conversations of each value of a column are trained on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from draftworks.config.mix import OFF, ON, THINKING
from draftworks.data.conversations import Conversation
from draftworks.data.slice_columns import ask_with_thinking
from draftworks.data.slice_weights import SlicePlan, select_weighted
from draftworks.data.split import hash_fraction
from draftworks.errors import DataError


@dataclass(frozen=True)
class SliceShares:
    """Shares of the values of one column; they add up to 1. Conversations of other values are not taken."""

    column: str
    by_value: Mapping[str, float]

    @classmethod
    def of(cls, shares: Mapping[str, Mapping[str, float]]) -> SliceShares | None:
        """Return the shares of a registry entry's mix; None where it has none."""
        return next((cls(column, by_value) for column, by_value in shares.items()), None)

    @property
    def is_of_thinking(self) -> bool:
        return self.column == THINKING


@dataclass(frozen=True)
class SharedSelection:
    """Conversations that were selected by shares.

    Attributes:
        available: conversations to choose among, by value.
        taken: conversations that were taken, by value.
    """

    conversations: list[Conversation]
    available: Mapping[str, int]
    taken: Mapping[str, int]


def select_shared(
    conversations: Sequence[Conversation], count: int, shares: SliceShares, plan: SlicePlan | None = None
) -> SharedSelection:
    """Return as many conversations as the shares allow, at most `count`, each slice chosen as by `select_weighted`.

    The slice with the fewest conversations for its share decides how many there are; nothing is repeated. By thinking, a
    prompt whose request left it open is asked on or off by its hash, so that another prompt changes nothing about it.

    Raises:
        DataError: a slice with a share has no conversation.
    """
    if shares.is_of_thinking:
        conversations = [_choose_way(one, shares.by_value[ON]) for one in conversations]
    slices: dict[str, list[Conversation]] = {value: [] for value, share in shares.by_value.items() if share}
    for one in conversations:
        slices.get(str(one.columns.get(shares.column)), []).append(one)
    for value, members in slices.items():
        if not members:
            known = Counter(str(one.columns.get(shares.column, "(none)")) for one in conversations)
            found = ", ".join(f"{name} ({number:,})" for name, number in sorted(known.items())) or "none"
            raise DataError(
                f"mix.shares: {shares.column}: expected conversations of {value} to train on, found none. There are: {found}. "
                "Set its share to 0, or give data with it"
            )
    total = min(count, *(math.floor(len(members) / shares.by_value[value] + 1e-9) for value, members in slices.items()))
    taken = _apportion(total, {value: shares.by_value[value] for value in slices})
    chosen = [one for value, members in slices.items() for one in select_weighted(members, taken[value], plan)]
    if shares.is_of_thinking:
        chosen = [ask_with_thinking(one, one.columns[THINKING] == ON) for one in chosen]
    return SharedSelection(chosen, {value: len(members) for value, members in slices.items()}, taken)


def _choose_way(conversation: Conversation, share_on: float) -> Conversation:
    """Return the conversation with thinking on or off as its request asked, or else by its hash."""
    columns = conversation.columns
    if columns.get(THINKING) in (ON, OFF):
        return conversation
    way = ON if hash_fraction(conversation.id, THINKING) < share_on else OFF
    return replace(conversation, columns={**columns, THINKING: way})


def _apportion(total: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Divide a number by shares, by the largest remainders."""
    taken = {value: math.floor(share * total + 1e-9) for value, share in shares.items()}
    by_remainder = sorted(shares, key=lambda value: (taken[value] - shares[value] * total, value))
    for value in by_remainder[: total - sum(taken.values())]:
        taken[value] += 1
    return taken
