"""Training sets of equal size, to compare what is learnt from prompts asked with thinking on, off, and both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from draftworks.config.mix import OFF, ON, THINKING
from draftworks.data.slice_columns import THINKING_PAIR
from draftworks.data.token_rows import TokenRow
from draftworks.errors import DataError
from draftworks.storage.identity import digest

MIXED = "mixed"


def choose_equal_sets(rows: Iterable[TokenRow], max_tokens: int) -> Mapping[str, Sequence[TokenRow]]:
    """Return the samples of three trainings: `on`, `off`, and `mixed`, which has both in the proportions of the data.

    Samples are chosen by hash. Each set has the tokens of the smaller kind, at most `max_tokens`, but for a rest that no
    sample fits into.

    Raises:
        DataError: one kind has no sample, or none that fits.
    """
    asked = [row for row in rows if THINKING_PAIR in row.columns]
    ordered = sorted(asked, key=lambda row: digest(row.sample_id))
    ways = {way: [row for row in ordered if row.columns[THINKING] == way] for way in (ON, OFF)}
    for way, members in ways.items():
        if not members:
            raise DataError(
                f"a comparison of thinking on and off needs training samples of both, and there is none with thinking {way}: "
                f"set its share in mix.shares above 0"
            )
    budget = min(max_tokens, *(sum(map(len, members)) for members in ways.values()))
    sets = {name: _take(members, budget) for name, members in {**ways, MIXED: ordered}.items()}
    empty = [name for name, members in sets.items() if not members]
    if empty:
        raise DataError(
            f"a comparison of thinking on and off: no sample of {', '.join(empty)} fits into {budget} tokens: raise "
            "comparison.tokens, or give more data"
        )
    return sets


def _take(rows: Iterable[TokenRow], budget: int) -> list[TokenRow]:
    taken, left = [], budget
    for row in rows:
        if len(row) <= left:
            taken.append(row)
            left -= len(row)
    return taken
