"""Answers that an unfinished step has kept, and their lengths, from the files that runs add them to. Torch-free."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.planning.estimates import Estimate
from draftworks.planning.lengths import ConversationSize, average
from draftworks.storage.files import open_regular
from draftworks.storage.records import AnswersIdentity

_MOST_BYTES = 512_000_000
"""Larger files are not read for a plan."""
_READ_RECORDS, _LEAST_RECORDS = 200, 10
_BEGIN = b'{"id": "'


@dataclass(frozen=True)
class KeptAnswers:
    """Answers to some conversations of a part of the data.

    Attributes:
        size: of these conversations, by some of them; None of too few. Those that ended first may be shorter than others.
    """

    count: int
    size: ConversationSize | None = None


NO_ANSWERS = KeptAnswers(0)


def find_kept_answers(folder: Path, wanted: AnswersIdentity, dtype: str | None, conversations: Path) -> KeptAnswers:
    """Return what was kept of the answers to a part of the prepared conversations.

    Args:
        folder: of the answers of the target's weights.
        dtype: that the engine computes in; None for answers of an endpoint.
        conversations: folder of the part. It is read only where there are answers.
    """
    files = [path for path in sorted(folder.glob("*.jsonl")) if path.stat().st_size <= _MOST_BYTES]
    files = [path for path in files if _is_wanted(path, wanted, dtype)]
    found = {each.name for path in files for each in _read_records(path)}
    if not found:
        return KeptAnswers(0)
    kept = sorted(found & _read_ids(conversations))
    if len(kept) < _LEAST_RECORDS:
        return KeptAnswers(len(kept))
    chosen = set(kept if len(kept) <= _READ_RECORDS else random.Random(0).sample(kept, _READ_RECORDS))
    records = {
        each.name: json.loads(each.line) for path in files for each in _read_records(path) if each.name in chosen
    }
    return KeptAnswers(len(kept), measure_records(list(records.values())))


def measure_records(records: list[dict[str, Any]]) -> ConversationSize | None:
    """Return the mean size of the conversations of these records, as `Dialogue.to_record` writes them; None of none."""
    samples = [
        [*each.get("earlier", ()), {"ids": each["ids"], "generated": each["generated"]}]
        for each in records
        if "ids" in each
    ]
    if not samples:
        return None
    figures = [
        [float(len(of)) for of in samples],
        [float(sum(len(one["ids"]) for one in of)) for of in samples],
        [float(sum(end - start for one in of for start, end in one["generated"])) for of in samples],
    ]
    weights = [1.0] * len(samples)
    return ConversationSize(*(average(list(map(Estimate.exactly, each)), weights, whole=False) for each in figures))


def _is_wanted(path: Path, wanted: AnswersIdentity, dtype: str | None) -> bool:
    with open_regular(path) as stream:
        try:
            of: Mapping[str, Any] = json.loads(stream.readline())["identity"]
        except (ValueError, KeyError, TypeError):
            return False
    engine = str(of.get("engine"))
    same_engine = engine.startswith("endpoint-") if dtype is None else f"-{dtype}" in engine
    decided = ("target", "tokenizer", "responses", "max_length")
    return same_engine and [of.get(name) for name in decided] == [getattr(wanted, name) for name in decided]


@dataclass(frozen=True)
class _Record:
    name: str
    line: bytes


def _read_records(path: Path) -> Iterator[_Record]:
    with open_regular(path) as stream:
        for line in stream:
            end = line.find(b'"', len(_BEGIN))
            if line.startswith(_BEGIN) and line.endswith(b"\n") and end > 0:
                yield _Record(line[len(_BEGIN) : end].decode("ascii", "replace"), line)


def _read_ids(folder: Path) -> Set[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from draftworks.data.conversations import CONVERSATIONS_FILE

    try:
        return set(pq.read_table(folder / CONVERSATIONS_FILE, columns=["id"]).column("id").to_pylist())
    except (OSError, pa.ArrowException):
        return set()  # the run says what is wrong with it
