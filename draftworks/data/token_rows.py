"""One tokenized sample, and how it is cut to a length."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from draftworks.data.conversations import Conversation, Scalar
from draftworks.errors import DataError


@dataclass(frozen=True, eq=False)
class TokenRow:
    """Token ids int32 (S,) and loss mask bool (S,): True where the model learns the token."""

    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    columns: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.sample_id

    @property
    def prompt_key(self) -> str:
        """Digest of the ids before the first supervised one; the id of the row if there is none before it."""
        prompt = self.input_ids[: int(np.argmax(self.loss_mask))] if self.supervised else self.input_ids
        return hashlib.sha256(prompt.astype("<i4").tobytes()).hexdigest() if len(prompt) else self.sample_id

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def token_digest(self) -> str:
        """Equal to `draftworks.storage.identity.token_digest` of the ids, without converting them to Python integers."""
        return hashlib.sha256(np.asarray(self.input_ids, dtype="<i4").tobytes()).hexdigest()

    @property
    def supervised(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


@dataclass
class AnsweredSample:
    """Token ids with the spans of answers, [start, end), that are learnt."""

    ids: list[int]
    spans: list[tuple[int, int]]


def build_answered_rows(samples: Iterable[AnsweredSample], conversation: Conversation) -> list[TokenRow]:
    """Return the rows of a conversation's samples, each to its last learnt answer; a sample that has none is left out.

    The last row has the id of the conversation; earlier ones have that id with a number appended.
    """
    learnt = [sample for sample in samples if sample.spans]
    names = [*(f"{conversation.id}.{number}" for number in range(1, len(learnt))), conversation.id]
    rows = []
    for name, sample in zip(names, learnt):
        mask = np.zeros(sample.spans[-1][1], dtype=np.bool_)  # (S,)
        for start, end in sample.spans:
            mask[start:end] = True
        rows.append(TokenRow(name, np.array(sample.ids[: len(mask)], dtype=np.int32), mask, conversation.columns))
    return rows


class CutRow(NamedTuple):
    """A row within the length limit, and how many supervised tokens were cut. `was_cut` is true for any cut token."""

    row: TokenRow
    was_cut: bool
    cut_supervised: int


def cut_to_length(row: TokenRow, max_length: int) -> CutRow:
    """Cut a row to its first `max_length` tokens.

    Raises:
        DataError: no supervised token is left.
    """
    if not row.supervised:
        raise DataError("no supervised token")
    if len(row) <= max_length:
        return CutRow(row, False, 0)
    cut = TokenRow(row.sample_id, row.input_ids[:max_length], row.loss_mask[:max_length], row.columns)
    if not cut.supervised:
        raise DataError(f"no supervised token in the first {max_length} of {len(row)}")
    return CutRow(cut, True, row.supervised - cut.supervised)
