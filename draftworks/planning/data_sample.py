"""Rows of a data set and their length, from its first rows. The libraries of its files are loaded when it is asked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from draftworks.config.registry_files import DatasetSpec
from draftworks.config.urls import is_url
from draftworks.data.sources import SERVED, find_dataset_files, find_files
from draftworks.planning.estimates import Estimate

SAMPLE_ROWS = 64
CHARACTERS_PER_TOKEN = Estimate(3.0, 4.0, 5.0)
"""Of text in English and code, by tokenizers with 32,000 to 150,000 tokens."""
UNSEEN_ANSWER_TOKENS = Estimate(50.0, 250.0, 2000.0)
"""Of an answer that is not there: to a logged request, or to a row that ends with a question."""
_UNKNOWN_ROWS_FACTOR = 1.5
_MAX_JSON_LIST_BYTES = 256_000_000
"""A JSON list is read whole for its first rows."""
_COUNTED_BYTES = 64_000_000
"""Rows of larger text files are estimated from their first rows."""
_SERVED_BYTES = 16_000_000
"""Of logs, which have to be parsed: most requests of a chat repeat earlier ones."""


@dataclass(frozen=True)
class DataSample:
    """Size of a data set.

    Attributes:
        rows: of all its files, before any is rejected.
        prompt_tokens, answer_tokens: of one row, before any cut; an estimate from characters, and a guess of answers that
            are not there.
        turns: of the assistant in one row, on average.
        tokenized: whether the rows have token ids already, which were counted.
        guessed: whether answers are not there, so that their lengths are a guess.
    """

    rows: Estimate
    prompt_tokens: Estimate
    answer_tokens: Estimate
    turns: float
    tokenized: bool = False
    guessed: bool = False

    def join(self, other: DataSample) -> DataSample:
        """Return the size of both data sets together, by row as the mean of all rows."""
        rows = self.rows + other.rows
        share = self.rows.value / rows.value if rows.value else 0.5
        return DataSample(
            rows,
            self.prompt_tokens * share + other.prompt_tokens * (1 - share),
            self.answer_tokens * share + other.answer_tokens * (1 - share),
            self.turns * share + other.turns * (1 - share),
            self.tokenized and other.tokenized,
            self.guessed or other.guessed,
        )


def sample_data(dataset: DatasetSpec, root: Path) -> DataSample | None:
    """Return the size of a data set by its first rows; None if its files lie elsewhere, or no row can be read.

    The redaction of served prompts is not run, and counts rows that it would drop.

    Raises:
        DataError: it has no files.
    """
    from draftworks.data.datasets import RawRow, read_rows
    from draftworks.data.formats import RowError, detect_format, parse_conversation, parse_tokens

    if any(map(is_url, dataset.files)):
        return None
    if dataset.format == SERVED:
        return _sample_served(dataset, root)
    files = find_files(dataset.files, root)
    if files[0].suffix.lower() == ".json" and files[0].stat().st_size > _MAX_JSON_LIST_BYTES:
        return None
    values = [row.value for row in islice(read_rows(files[0]), SAMPLE_ROWS) if isinstance(row, RawRow)]
    prompts = answers = unseen = turns = read = 0
    tokenized = False
    for value in values:
        try:
            if detect_format(value) == "tokens":
                row, tokenized = parse_tokens(value), True
                answers += len(row)
            else:
                talk = parse_conversation(value)
                answers += sum(len(turn.content) for turn in talk.turns if turn.role == "assistant")
                turns += sum(turn.role == "assistant" for turn in talk.turns)
                unseen += talk.awaits_answer
                prompts += sum(len(turn.content) for turn in talk.turns if turn.role != "assistant")
        except (RowError, RecursionError):
            continue
        read += 1
    if not read:
        return None
    rows = _count_rows(files, values)
    if tokenized:
        return DataSample(rows, Estimate.exactly(0.0), Estimate.within(answers / read, 1.2), 1.0, tokenized=True)
    of_row = [Estimate.exactly(count / read).divide_by(CHARACTERS_PER_TOKEN) for count in (prompts, answers)]
    answered = of_row[1] + UNSEEN_ANSWER_TOKENS * (unseen / read)
    return DataSample(rows, of_row[0], answered, max(turns / read, 1.0), guessed=unseen > 0)


def _sample_served(dataset: DatasetSpec, root: Path) -> DataSample | None:
    from draftworks.data.served.loading import sample_prompts

    found = sample_prompts(dataset, root, _SERVED_BYTES)
    if not found.prompts:
        return None
    rows = Estimate.exactly(found.prompts)
    if not found.complete:
        size = sum(path.stat().st_size for path in find_dataset_files(dataset, root))
        rows = Estimate.within(found.prompts * max(size / found.nbytes, 1.0), _UNKNOWN_ROWS_FACTOR)
    asked = Estimate.exactly(found.characters / found.prompts).divide_by(CHARACTERS_PER_TOKEN)
    turns = found.answers / found.prompts
    return DataSample(rows, asked, UNSEEN_ANSWER_TOKENS * turns, turns, guessed=True)


def _count_rows(files: list[Path], first: list[Any]) -> Estimate:
    """Return the number of rows: counted where that is cheap, else by the size of the first rows."""
    found = Estimate.exactly(0.0)
    size = sum(len(json.dumps(value, ensure_ascii=False, default=str).encode()) for value in first) / max(len(first), 1)
    for path in files:
        if path.suffix.lower() == ".parquet":
            import pyarrow.parquet as pq

            found += Estimate.exactly(pq.ParquetFile(path).metadata.num_rows)
        elif path.suffix.lower() == ".jsonl" and path.stat().st_size <= _COUNTED_BYTES:
            with path.open("rb") as lines:
                found += Estimate.exactly(sum(bool(line.strip()) for line in lines))
        else:
            found += Estimate.within(path.stat().st_size / max(size, 1.0), _UNKNOWN_ROWS_FACTOR)
    return found
