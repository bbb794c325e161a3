"""The steps of the data room as the platform runs them: each fills a folder and returns the summary of what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from draftworks.data.conversations import read_conversations, select, write_conversations
from draftworks.data.datasets import kind_of, load_conversations, load_tokens
from draftworks.data.split import is_held_out
from draftworks.data.tokenized import TokenizedSet, write_tokens
from draftworks.data.tokenizing import Progress, fit_rows, tokenize
from draftworks.data.vocab import build_vocab_mapping, supervised_counts
from draftworks.errors import DataError
from draftworks.identity import digest
from draftworks.runs import TOKENS_FOLDER, VOCAB_FILE, TargetFiles
from draftworks.specs import DatasetSpec, DataSpec

Part = Literal["train", "heldout"]
PARTS: tuple[Part, ...] = ("train", "heldout")


def prepare_conversations(
    dataset: DatasetSpec, data: DataSpec, root: Path, target: TargetFiles, out: Path
) -> dict[str, Any]:
    """Read, validate, choose and split a data set: `out/train`, `out/heldout` and `out/quarantine.jsonl`.

    Raises:
        DataError: no usable rows, too many rejected ones, or a part without any.
    """
    kind = kind_of(dataset, root)
    if kind == "tokens":
        loaded = load_tokens(dataset, root, out, data.max_rejected_share, target.vocab_size)
        items: tuple[Any, ...] = loaded.rows
    else:
        loaded = load_conversations(dataset, root, out, data.max_rejected_share)
        items = loaded.conversations
    chosen = select(items, data.max_conversations)
    parts: dict[str, list[Any]] = {part: [] for part in PARTS}
    for item in chosen:
        parts["heldout" if is_held_out(item.id, data.held_out_share) else "train"].append(item)
    for part, members in parts.items():
        if not members:
            raise DataError(
                f"data set {dataset.name}: none of {len(chosen)} conversations falls into the {part} part "
                f"(held_out_share {data.held_out_share}). Give more conversations or change the share"
            )
    write = write_tokens if kind == "tokens" else write_conversations
    summaries = {part: write(out / part, members) for part, members in parts.items()}
    return {
        "kind": kind,
        "conversations": len(chosen),
        **{part: len(members) for part, members in parts.items()},
        **loaded.report.counts(),
        "digest": digest([summaries[part]["digest"] for part in PARTS]),
    }


def tokenize_part(
    part: Path, kind: str, target: TargetFiles, data: DataSpec, max_length: int, out: Path, progress: Progress
) -> dict[str, Any]:
    """Tokenize one part of a conversations set with the target's chat template, its own answers kept: `out/tokens`.

    A part of `kind` "tokens" is tokenized already and only cut to `max_length`.
    """
    if kind == "tokens":
        result = fit_rows(TokenizedSet.open(part), target, data, max_length)
    else:
        result = tokenize(read_conversations(part), target, data, max_length, progress)
    return write_tokens(out / TOKENS_FOLDER, result.rows, result.counts())


def supervised_rows(tokens: Path, out: Path) -> dict[str, Any]:
    """A tokenized set as training wants it: rows with something to learn, nothing else changed."""
    source = TokenizedSet.open(tokens)
    rows = [row for row in map(source.row, range(len(source))) if row.supervised]
    if not rows:
        raise DataError(f"{tokens}: none of its {len(source)} samples has a supervised token: nothing to train on")
    return write_tokens(out, rows, {"without_supervision": len(source) - len(rows)})


def map_vocabulary(tokens: Path, target: TargetFiles, draft_vocab_size: int, out: Path) -> dict[str, Any]:
    """The reduced vocabulary of a target's drafts: its most frequent supervised tokens."""
    counts = supervised_counts(TokenizedSet.open(tokens), target.vocab_size)
    mapping = build_vocab_mapping(counts, draft_vocab_size)
    mapping.save(out / VOCAB_FILE)
    return {
        "draft_vocab_size": draft_vocab_size,
        "vocab_size": target.vocab_size,
        "coverage": mapping.coverage(counts),
        "digest": mapping.digest,
    }
