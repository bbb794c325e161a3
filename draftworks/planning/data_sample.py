"""Rows of a data set and their length, from some of its rows. The libraries of its files are loaded when it is asked."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftworks.config.registry_files import DatasetSpec
from draftworks.config.urls import is_url
from draftworks.data.sources import SERVED, find_dataset_files, find_files
from draftworks.planning.estimates import Estimate
from draftworks.planning.lengths import RowSize, TextSize

if TYPE_CHECKING:
    from draftworks.data.conversations import Conversation  # it imports pyarrow

SAMPLE_ROWS = 128
_MOST_FILES = 16
"""Files that rows are read of."""
_UNKNOWN_ROWS_FACTOR = 1.5
_MAX_JSON_LIST_BYTES = 256_000_000
"""A JSON list is read whole for its rows."""
_COUNTED_BYTES = 64_000_000
"""Rows of larger text files are estimated from some of them."""
_SERVED_BYTES = 16_000_000
"""Of logs, which have to be parsed: most requests of a chat repeat earlier ones."""
_PARSED_BYTES = 8_000_000


@dataclass(frozen=True)
class DataSample:
    """Size of a data set.

    Attributes:
        rows: of all its files, before any is rejected.
        sizes: of some rows, chosen at random.
        whole: whether these are all rows.
        tokenized: whether the rows have token ids already, which were counted.
    """

    rows: Estimate
    sizes: tuple[RowSize, ...]
    whole: bool = False
    tokenized: bool = False

    @property
    def guessed(self) -> bool:
        """Whether answers are not there, so that their lengths are a guess."""
        return any(each.unseen for each in self.sizes)

    def join(self, other: DataSample) -> DataSample:
        """Return the size of both data sets together; each row stands for as many as its data set has."""
        return DataSample(
            self.rows + other.rows,
            (*self._weigh(), *other._weigh()),
            self.whole and other.whole,
            self.tokenized and other.tokenized,
        )

    def _weigh(self) -> Iterator[RowSize]:
        total = sum(each.weight for each in self.sizes)
        return (each.weigh(each.weight * self.rows.value / total) for each in self.sizes)


def sample_data(dataset: DatasetSpec, root: Path) -> DataSample | None:
    """Return the size of a data set by some rows; None if its files lie elsewhere, or no row can be read.

    The redaction of served prompts is not run, and counts rows that it would drop.

    Raises:
        DataError: it has no files.
    """
    if any(map(is_url, dataset.files)):
        return None
    if dataset.format == SERVED:
        return _sample_served(dataset, root)
    files = find_files(dataset.files, root)
    chosen = files if len(files) <= _MOST_FILES else [files[n * len(files) // _MOST_FILES] for n in range(_MOST_FILES)]
    found = [each for each in (_sample_file(path, -(-SAMPLE_ROWS // len(chosen))) for path in chosen) if each]
    if not found:
        return None
    joined = found[0]
    for each in found[1:]:
        joined = joined.join(each)
    if len(chosen) == len(files) and len(found) == len(files):
        return joined
    share = sum(path.stat().st_size for path in files) / max(sum(path.stat().st_size for path in chosen), 1)
    rows = joined.rows * share
    bounds = Estimate(rows.low / _UNKNOWN_ROWS_FACTOR, rows.value, rows.high * _UNKNOWN_ROWS_FACTOR)
    return DataSample(bounds, joined.sizes, False, joined.tokenized)


def sample_conversations(dataset: DatasetSpec, root: Path, most: int) -> list[Conversation]:
    """Return conversations of some rows of a data set; none where its files lie elsewhere, are logs, or have token ids.

    Raises:
        DataError: it has no files.
    """
    from draftworks.data.formats import RowError, detect_format, parse_conversation

    if dataset.format == SERVED or any(map(is_url, dataset.files)):
        return []
    files = find_files(dataset.files, root)
    found: list[Conversation] = []
    for path in files[:most]:
        chosen = _choose_rows(path, -(-most // min(len(files), most)))
        for value in chosen.values if chosen else ():
            try:
                if detect_format(value) != "tokens":
                    found.append(parse_conversation(value))
            except (RowError, RecursionError):
                continue
    return found[:most]


def _sample_file(path: Path, most: int) -> DataSample | None:
    """Return the size of one file; None if no row can be read."""
    found = _choose_rows(path, most)
    if found is None:
        return None
    sizes, tokenized = list[RowSize](), False
    for value in found.values:
        size = _measure_row(value)
        if size is not None:
            sizes.append(size)
            tokenized = tokenized or not size.messages
    return DataSample(found.rows, tuple(sizes), found.whole, tokenized) if sizes else None


def _measure_row(value: Any) -> RowSize | None:
    from draftworks.data.formats import RowError, detect_format, parse_conversation, parse_tokens

    try:
        if detect_format(value) == "tokens":
            return RowSize(TextSize(), TextSize(tokens=len(parse_tokens(value))))
        talk = parse_conversation(value)
    except (RowError, RecursionError):
        return None
    answers = [turn for turn in talk.turns if turn.role == "assistant"]
    return RowSize(
        prompt=_sum_texts(turn.content for turn in talk.turns if turn.role != "assistant"),
        answer=_sum_texts(turn.content for turn in answers),
        thoughts=_sum_texts(turn.reasoning for turn in answers),
        messages=float(len(talk.turns)),
        turns=float(max(len(answers), 1)),
        unseen=float(talk.awaits_answer),
    )


def _sum_texts(texts: Iterator[str]) -> TextSize:
    return sum(map(TextSize.of, texts), TextSize())


def _sample_served(dataset: DatasetSpec, root: Path) -> DataSample | None:
    from draftworks.data.served.loading import sample_prompts

    found = sample_prompts(dataset, root, _SERVED_BYTES)
    if not found.prompts:
        return None
    rows = Estimate.exactly(found.prompts)
    if not found.complete:
        size = sum(path.stat().st_size for path in find_dataset_files(dataset, root))
        rows = Estimate.within(found.prompts * max(size / found.nbytes, 1.0), _UNKNOWN_ROWS_FACTOR)
    turns = found.answers / found.prompts
    asked = TextSize(plain=found.characters / found.prompts)
    return DataSample(
        rows, (RowSize(asked, TextSize(), messages=2 * turns, turns=turns, unseen=turns),), found.complete
    )


@dataclass(frozen=True)
class _ChosenRows:
    """Rows of a file that were chosen at random, how many it has, and whether these are all."""

    values: Sequence[Any]
    rows: Estimate
    whole: bool


def _choose_rows(path: Path, most: int) -> _ChosenRows | None:
    """Return some rows of a file; None of a JSON list that is too large to be read. The same rows each time."""
    from draftworks.data.datasets import RawRow, decode_line, is_json_list, read_rows

    suffix, size = path.suffix.lower(), path.stat().st_size
    if suffix == ".parquet":
        return _choose_of_parquet(path, most)
    if suffix == ".json" and is_json_list(path):
        if size > _MAX_JSON_LIST_BYTES:
            return None
        values = [row.value for row in read_rows(path) if isinstance(row, RawRow)]
        chosen = values if len(values) <= most else random.Random(0).sample(values, most)
        return _ChosenRows(chosen, Estimate.exactly(len(values)), len(chosen) == len(values))
    lines = _choose_lines(path, most) if size <= _COUNTED_BYTES else _choose_places(path, most, size)
    kept = [row for row in (decode_line(line, str(path), 0) for line in lines.values) if isinstance(row, RawRow)]
    return _ChosenRows([row.value for row in kept], lines.rows, lines.whole)


def _choose_lines(path: Path, most: int) -> _ChosenRows:
    """Count the lines of a file, and choose some of them, each as likely as any other."""
    chooser, kept, count = random.Random(0), list[bytes](), 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.strip():
                continue
            count += 1
            if len(kept) < most:
                kept.append(line)
            elif (place := int(chooser.random() * count)) < most:
                kept[place] = line
    return _ChosenRows(kept, Estimate.exactly(count), len(kept) == count)


def _choose_places(path: Path, most: int, size: int) -> _ChosenRows:
    """Return the lines after places that are spread over a large file."""
    kept, nbytes = list[bytes](), 0
    with path.open("rb") as stream:
        for number in range(most):
            stream.seek(size * number // most)
            if number:
                stream.readline(_PARSED_BYTES)
            line = stream.readline(_PARSED_BYTES)
            if line.strip() and nbytes < _PARSED_BYTES:
                kept.append(line)
                nbytes += len(line)
    return _ChosenRows(kept, Estimate.within(size * len(kept) / max(nbytes, 1), _UNKNOWN_ROWS_FACTOR), False)


def _choose_of_parquet(path: Path, most: int) -> _ChosenRows:
    """Return the first rows of some row groups."""
    import pyarrow.parquet as pq

    from draftworks.errors import DataError

    try:
        with pq.ParquetFile(path) as file:
            count, groups = file.metadata.num_rows, file.num_row_groups
            chosen = sorted({number * groups // 4 for number in range(4)}) if groups else []
            each = -(-most // max(len(chosen), 1))
            values: list[Any] = []
            for group in chosen:
                batch = next(iter(file.iter_batches(batch_size=each, row_groups=[group])), None)
                values += [] if batch is None else islice(batch.to_pylist(), each)
    except (OSError, ValueError) as error:  # pyarrow's errors of files are ValueErrors
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error
    return _ChosenRows(values, Estimate.exactly(count), len(values) == count)
