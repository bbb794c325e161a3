"""Conversations that gave no sample: when they are too many, and how they are recorded."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draftworks.errors import DataError
from draftworks.storage.files import publish_file
from draftworks.storage.identity import canonical_json
from draftworks.storage.words import list_lines

SHOWN_REJECTIONS = 3
KEPT_REASONS = 20


class RejectedSample(NamedTuple):
    """A conversation that gave no sample, and why; `excerpt` is its beginning, if known."""

    sample_id: str
    reason: str
    excerpt: str = ""


def count_rejections(rejected: Sequence[RejectedSample]) -> dict[str, Any]:
    """Return the number of rejections by reason, for the summary of `write_tokens`."""
    reasons = Counter(each.reason for each in rejected)
    return {
        "rejected": len(rejected),
        "rejected_reasons": dict(reasons.most_common(KEPT_REASONS)),
        "rejected_samples": {each.sample_id: each.reason for each in rejected[:KEPT_REASONS]},
    }


def write_rejected(path: Path, rejected: Sequence[RejectedSample]) -> None:
    """Write all rejections, one JSON object per line."""
    with publish_file(path) as staging:
        staging.write_text("".join(canonical_json(each._asdict()) + "\n" for each in rejected))


def read_rejected(path: Path) -> list[RejectedSample]:
    """Read what `write_rejected` wrote."""
    return [RejectedSample(**json.loads(line)) for line in path.read_text().splitlines()]


def describe_commonest(reasons: Counter[str]) -> str:
    """Return the commonest kind of reason and how often it is; two that differ in numbers only are of one kind."""
    kinds: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for reason, count in reasons.items():
        kind = re.sub(r"\d+", "#", reason)
        kinds[kind] += count
        examples.setdefault(kind, reason)
    ((kind, count),) = kinds.most_common(1)
    return f"Most often ({count:,} times): {examples[kind]}"


def check_rejected(rejected: Sequence[RejectedSample], total: int, limit: float, file: Path | None = None) -> None:
    """Raise DataError if more than the share `limit` of all conversations is rejected, or all; `file` lists them."""
    if not total:
        raise DataError("there is no conversation to tokenize")
    if len(rejected) > limit * total or len(rejected) == total:
        shown = list_lines((f"  sample {each.sample_id}: {each.reason}" for each in rejected), SHOWN_REJECTIONS)
        where = "" if file is None else f"\nAll of them are in {file}: repair them, or raise max_rejected_share"
        raise DataError(
            f"{len(rejected):,} of {total:,} conversations give no sample ({len(rejected) / total:.1%}),"
            f" max_rejected_share allows {limit:.1%}. {describe_commonest(Counter(each.reason for each in rejected))}."
            f" The first:\n{shown}{where}"
        )
