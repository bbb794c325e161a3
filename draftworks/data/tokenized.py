"""Tokenized sets: samples of token ids and loss masks in Parquet, content-addressed, opened as flat numpy arrays."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftworks.config.data import OFF, ON, THINKING
from draftworks.data.conversations import SUMMARY_FILE, Conversation, Scalar, read_summary
from draftworks.data.slices import THINKING_PAIR
from draftworks.errors import DataError, StoreError
from draftworks.storage.artifacts import FileManifest
from draftworks.storage.files import publish_file, publish_json
from draftworks.storage.identity import DIGEST_LENGTH, canonical_json, digest, file_digest


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


TOKENS_FILE = "tokens.parquet"
SCHEMA_VERSION = 1
ROWS_PER_GROUP = 1024
NOTHING_LOST = {"cut_samples": 0, "cut_supervised_tokens": 0, "rejected": 0, "rejected_reasons": {}}

_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("input_ids", pa.large_list(pa.int32())),
        ("loss_mask", pa.large_list(pa.uint8())),
        ("columns", pa.string()),
    ]
)


def write_tokens(folder: Path, rows: Iterable[TokenRow], counts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Publish tokens.parquet, then summary.json, which makes the set complete; return the summary.

    The summary has samples, tokens, supervised_tokens, supervised_share, longest, what was cut and rejected, and
    `digest`: of (sample id, ids, mask) of all samples, in any order.

    Args:
        counts: further entries of the summary, as `TokenizeResult.counts()`.

    Raises:
        DataError: no sample, two with one id, or a mask of another length than its ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    totals = _Totals()
    iterator = iter(rows)
    with publish_file(folder / TOKENS_FILE) as staging, pq.ParquetWriter(staging, _SCHEMA) as writer:
        while group := list(islice(iterator, ROWS_PER_GROUP)):
            for row in group:
                totals.add(row)
            writer.write_table(_as_table(group))
        if not totals.contents:
            raise DataError(f"{folder}: there is no tokenized sample to write")
    summary = {
        "schema": SCHEMA_VERSION,
        **totals.summary(),
        **NOTHING_LOST,
        **(counts or {}),
        "file_digest": file_digest(folder / TOKENS_FILE),
    }
    publish_json(folder / SUMMARY_FILE, summary)
    return summary


@dataclass(frozen=True, eq=False)
class TokenizedSet(Sequence[TokenRow]):
    """A published tokenized set in memory: all ids and masks as two flat arrays, samples as read-only slices of them.

    Attributes:
        digest: content digest of the set; the data version of the asset that made it.
        lengths: tokens of each sample, int64 (N,).
    """

    summary: dict[str, Any]
    sample_ids: tuple[str, ...]
    lengths: np.ndarray
    _input_ids: np.ndarray
    _loss_mask: np.ndarray
    _starts: np.ndarray
    _columns: pa.Array

    @classmethod
    def open(cls, folder: Path) -> TokenizedSet:
        """Open a folder made by `write_tokens`.

        Raises:
            StoreError: missing, incomplete, truncated, altered, or of another schema.
        """
        summary = read_summary(folder, "a tokenized set")
        path = folder / TOKENS_FILE
        FileManifest.of_digests({TOKENS_FILE: summary["file_digest"]}).require_intact(folder, "Make the set again")
        with pq.ParquetFile(path, memory_map=True) as file:  # `read_table` imports pandas for its datasets
            table = file.read()
        if not table.schema.equals(_SCHEMA):
            raise StoreError(f"{path}: expected columns {_SCHEMA.names} of this version, found {table.schema.names}")
        return cls._from_table(summary, table.combine_chunks(), path)

    @classmethod
    def _from_table(cls, summary: dict[str, Any], table: pa.Table, path: Path) -> TokenizedSet:
        columns = {name: table.column(name).combine_chunks() for name in table.column_names}
        ids, mask = columns["input_ids"], columns["loss_mask"]
        starts = np.from_dlpack(ids.offsets)  # `to_numpy` imports pandas
        if not np.array_equal(starts, np.from_dlpack(mask.offsets)):
            raise StoreError(f"{path}: loss masks and token ids have different lengths: make the set again")
        return cls(
            summary=summary,
            sample_ids=tuple(columns["sample_id"].to_pylist()),
            lengths=np.diff(starts),
            _input_ids=np.from_dlpack(ids.values),
            _loss_mask=np.from_dlpack(mask.values).view(np.bool_),
            _starts=starts,
            _columns=columns["columns"],
        )

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, index: int) -> TokenRow:  # pyright: ignore[reportIncompatibleMethodOverride] - no slices
        return self.row(index)

    def __iter__(self) -> Iterator[TokenRow]:
        return (self.row(index) for index in range(len(self)))

    def row(self, index: int) -> TokenRow:
        """Return sample `index`, 0 <= index < len; its arrays are views.

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        begin, end = self._starts[index], self._starts[index + 1]
        columns = json.loads(self._columns[index].as_py())
        return TokenRow(self.sample_ids[index], self._input_ids[begin:end], self._loss_mask[begin:end], columns)

    def by_id(self, sample_id: str) -> TokenRow:
        """Return the sample with that id; StoreError if there is none."""
        if sample_id not in self._positions:
            raise StoreError(f"sample {sample_id} is not among the {len(self)} of tokenized set {self.digest}")
        return self.row(self._positions[sample_id])

    @property
    def digest(self) -> str:
        return self.summary["digest"]

    @property
    def columns(self) -> list[dict[str, Any]]:
        """The columns of every sample, in order."""
        return [json.loads(text) for text in self._columns.to_pylist()]

    @property
    def flat_ids(self) -> np.ndarray:
        """Ids of all samples, one after the other, int32 (tokens,)."""
        return self._input_ids

    @property
    def flat_mask(self) -> np.ndarray:
        """Loss masks of all samples, one after the other, bool (tokens,)."""
        return self._loss_mask

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {sample_id: index for index, sample_id in enumerate(self.sample_ids)}


class _Totals:
    """Counts and content digests of the rows written so far."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.tokens = self.supervised = self.longest = 0

    def add(self, row: TokenRow) -> None:
        if row.sample_id in self.contents:
            raise DataError(f"two tokenized samples have the id {row.sample_id}")
        if len(row.input_ids) != len(row.loss_mask):
            raise DataError(f"sample {row.sample_id}: {len(row.input_ids)} ids but {len(row.loss_mask)} mask entries")
        ids = hashlib.sha256(_as_ids(row).astype("<i4").tobytes())
        mask = hashlib.sha256(_as_mask(row).tobytes())
        self.contents[row.sample_id] = ids.digest() + mask.digest()
        self.tokens += len(row)
        self.supervised += row.supervised
        self.longest = max(self.longest, len(row))

    def summary(self) -> dict[str, Any]:
        content = hashlib.sha256()
        for sample_id in sorted(self.contents):
            content.update(canonical_json(sample_id).encode() + self.contents[sample_id])
        return {
            "samples": len(self.contents),
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "supervised_share": self.supervised / max(self.tokens, 1),
            "longest": self.longest,
            "digest": content.hexdigest()[:DIGEST_LENGTH],
        }


def _as_table(rows: list[TokenRow]) -> pa.Table:
    starts = np.concatenate(([0], np.cumsum([len(row) for row in rows])))
    ids = pa.array(np.concatenate([_as_ids(row) for row in rows]))
    mask = pa.array(np.concatenate([_as_mask(row) for row in rows]))
    arrays = [
        pa.array([row.sample_id for row in rows], pa.string()),
        pa.LargeListArray.from_arrays(starts, ids),
        pa.LargeListArray.from_arrays(starts, mask),
        pa.array([canonical_json(dict(row.columns)) for row in rows], pa.string()),
    ]
    return pa.Table.from_arrays(arrays, schema=_SCHEMA)


def _as_ids(row: TokenRow) -> np.ndarray:
    return np.asarray(row.input_ids, dtype=np.int32)


def _as_mask(row: TokenRow) -> np.ndarray:
    return np.asarray(row.loss_mask, dtype=np.bool_).view(np.uint8)


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
