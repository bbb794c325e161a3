"""Data preparation steps as assets run them, mixes of data sets included: each fills a folder and returns its summary."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from draftworks.config.data import OFF, ON, THINKING
from draftworks.config.registry_files import DatasetSpec, DataSpec
from draftworks.config.run_files import EVAL_PART, TOKENS_FOLDER, VOCAB_FILE, TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import QUARANTINE_FILE, Conversation, read_conversations, select, write_conversations
from draftworks.data.datasets import detect_kind, load_conversations, load_tokens
from draftworks.data.served.loading import load_served
from draftworks.data.slices import (
    THINKING_PAIR,
    WEIGHTS_FILE,
    SlicePlan,
    add_slice_columns,
    ask_both_ways,
    ask_with_thinking,
    save_plan,
    select_weighted,
)
from draftworks.data.sources import SERVED
from draftworks.data.split import hash_fraction, is_held_out
from draftworks.data.tokenized import TokenizedSet, TokenRow, write_tokens
from draftworks.data.tokenizing import Progress, cut_rows, tokenize
from draftworks.data.vocab import VocabMapping, build_vocab_mapping, count_supervised_tokens
from draftworks.errors import DataError
from draftworks.storage.files import publish_file, remove
from draftworks.storage.identity import digest


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


Part = Literal["train", "heldout"]
PARTS: tuple[Part, ...] = ("train", "heldout")


def prepare_conversations(
    dataset: DatasetSpec, data: DataSpec, root: Path, target: TargetFiles, out: Path
) -> dict[str, Any]:
    """Read, validate, select and split a data set into `out/train`, `out/heldout` and `out/quarantine.jsonl`.

    Raises:
        DataError: no usable rows, too many rejected ones, or an empty part.
    """
    chosen = choose_rows(dataset, data.max_conversations, data.max_rejected_share, root, target, out)
    return write_parts(chosen, split_parts(chosen.items, data.held_out_share), dataset.name, data, out)


def split_parts(items: Iterable[Any], held_out_share: float) -> dict[Part, list[Any]]:
    """Return the training part and the held-out part, by hash of the prompts."""
    parts: dict[Part, list[Any]] = {part: [] for part in PARTS}
    for item in items:
        parts["heldout" if is_held_out(item.prompt_key, held_out_share) else "train"].append(item)
    return parts


def write_parts(
    chosen: Chosen, parts: Mapping[Part, Sequence[Any]], name: str, data: DataSpec, out: Path
) -> dict[str, Any]:
    """Write both parts of a prepared set and return its summary. Raises DataError for an empty part."""
    prompts = Counter(item.prompt_key for members in parts.values() for item in members)
    for part, members in parts.items():
        if not members:
            raise DataError(
                f"data set {name}: none of {len(chosen.items)} conversations, of {len(prompts)} prompts, falls into the {part} "
                f"part (held_out_share {data.held_out_share}). Give more conversations or change the share"
            )
    summaries = {part: chosen.write(out / part, members) for part, members in parts.items()}
    return {
        "kind": chosen.kind,
        "conversations": len(chosen.items),
        **{part: len(members) for part, members in parts.items()},
        "prompts": len(prompts),
        "sharing_a_prompt": sum(count for count in prompts.values() if count > 1),
        **chosen.counts,
        "digest": digest([summaries[part]["digest"] for part in PARTS]),
    }


def prepare_eval_set(
    dataset: DatasetSpec,
    max_conversations: int | None,
    data: DataSpec,
    root: Path,
    target: TargetFiles,
    out: Path,
    part: Literal["all", "held_out"] = "all",
    both_ways: bool = False,
) -> dict[str, Any]:
    """Read, validate and select a data set for evaluation only: `out/all` and `out/quarantine.jsonl`.

    Args:
        part: held_out for the conversations that `prepare_conversations` leaves out of the training part.
        both_ways: each conversation is asked with thinking off and on; data that is tokenized already stays as it is.

    Raises:
        DataError: no usable rows, or too many rejected ones.
    """
    chosen = choose_rows(dataset, None, data.max_rejected_share, root, target, out)
    items = chosen.items if part == "all" else tuple(split_parts(chosen.items, data.held_out_share)["heldout"])
    if not items:
        raise DataError(
            f"data set {dataset.name}: none of its {len(chosen.items)} conversations is held out (held_out_share "
            f"{data.held_out_share}). Give more conversations or change the share"
        )
    items = select(items, max_conversations)
    if both_ways and chosen.kind != "tokens":
        items = ask_both_ways(items)
    chosen = replace(chosen, items=tuple(items))
    summary = chosen.write(out / EVAL_PART, chosen.items)
    return {"kind": chosen.kind, "conversations": len(chosen.items), **chosen.counts, "digest": summary["digest"]}


@dataclass(frozen=True)
class Chosen:
    """Usable rows of a data set: conversations, or rows that are tokenized already."""

    kind: str
    items: tuple[Any, ...]
    counts: dict[str, Any]

    def write(self, folder: Path, members: Sequence[Any]) -> dict[str, Any]:
        write = write_tokens if self.kind == "tokens" else write_conversations
        return write(folder, members)


def choose_rows(
    dataset: DatasetSpec, count: int | None, max_rejected_share: float, root: Path, target: TargetFiles, out: Path
) -> Chosen:
    """Read and validate a data set, and select `count` of its rows (None for all).

    Raises:
        DataError: no usable rows, or too many rejected ones.
    """
    if dataset.format == SERVED:
        served = load_served(dataset, root, out, max_rejected_share)
        items = tuple(select(served.conversations, count))
        return Chosen("conversations", items, {**served.counts, "lineage": {dataset.name: served.lineage}})
    kind = detect_kind(dataset, root)
    if kind == "tokens":
        loaded = load_tokens(dataset, root, out, max_rejected_share, target.vocab_size)
        return Chosen(kind, tuple(select(loaded.rows, count)), loaded.report.counts())
    loaded = load_conversations(dataset, root, out, max_rejected_share)
    return Chosen(kind, tuple(select(loaded.conversations, count)), loaded.report.counts())


def tokenize_part(
    part: Path,
    kind: str,
    target: TargetFiles,
    data: DataSpec,
    max_length: int,
    out: Path,
    progress: Progress,
    thinking: bool | None = None,
) -> dict[str, Any]:
    """Tokenize one part of a conversation set, with its own answers, by the target's chat template: `out/tokens`.

    A part of `kind` "tokens" is tokenized already and only cut to `max_length`.
    """
    if kind == "tokens":
        result = cut_rows(TokenizedSet.open(part), target, data, max_length)
    else:
        result = tokenize(read_conversations(part), target, data, max_length, progress, thinking=thinking)
    return write_tokens(out / TOKENS_FOLDER, result.rows, result.counts())


def keep_supervised_rows(tokens: Path, out: Path, count_by: str | None = None) -> dict[str, Any]:
    """Copy a tokenized set for training: only the rows with a supervised token, otherwise unchanged.

    Args:
        count_by: column by whose values samples and tokens are counted in the summary.
    """
    source = TokenizedSet.open(tokens)
    rows = [row for row in map(source.row, range(len(source))) if row.supervised]
    if not rows:
        raise DataError(f"{tokens}: none of its {len(source)} samples has a supervised token: nothing to train on")
    counts: dict[str, Any] = {"without_supervision": len(source) - len(rows)}
    if count_by is not None:
        counts["slices"] = _count_slices(rows, count_by)
    return write_tokens(out, rows, counts)


def _count_slices(rows: Iterable[TokenRow], column: str) -> dict[str, dict[str, int]]:
    """Return samples, tokens and supervised tokens by value of a column."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        counts = found.setdefault(str(row.columns.get(column)), Counter())
        counts.update(samples=1, tokens=len(row), supervised_tokens=int(row.supervised))
    return {value: dict(counts) for value, counts in sorted(found.items())}


def map_vocabulary(
    tokens: Path, target: TargetFiles, draft_vocab_size: int, out: Path, heldout: Path | None = None
) -> dict[str, Any]:
    """Write the reduced vocabulary of a target's drafts: its most frequent supervised tokens.

    `coverage` and `heldout_coverage` are the shares of supervised tokens in `tokens` and in `heldout` that it has.
    """
    counts = count_supervised_tokens(TokenizedSet.open(tokens), target.vocab_size)
    mapping = build_vocab_mapping(counts, draft_vocab_size)
    mapping.save(out / VOCAB_FILE)
    return {
        "draft_vocab_size": draft_vocab_size,
        "vocab_size": target.vocab_size,
        "coverage": mapping.measure_coverage(counts),
        **({} if heldout is None else {"heldout_coverage": _measure_coverage(mapping, heldout, target)}),
        "digest": mapping.digest,
    }


def _measure_coverage(mapping: VocabMapping, tokens: Path, target: TargetFiles) -> float:
    return mapping.measure_coverage(count_supervised_tokens(TokenizedSet.open(tokens), target.vocab_size))


def prepare_mix(
    datasets: Sequence[DatasetSpec],
    plan: SlicePlan | None,
    data: DataSpec,
    root: Path,
    target: TargetFiles,
    out: Path,
    shares: SliceShares | None = None,
) -> dict[str, Any]:
    """Read several data sets and split them together into `out/train` and `out/heldout`, as `prepare_conversations`.

    Plan and shares decide the training part alone: what drafts are measured on is the same with any of them. With shares of
    thinking, it is asked both ways.

    Raises:
        DataError: as `prepare_conversations`, a data set that is tokenized already, or a share of a slice without data.
        ConfigError: shares of thinking, and the target's template has no switch for it.
    """
    if shares is not None and shares.is_of_thinking:
        ChatTokenizer.load(target, thinking=True)
    read = _read_mix(datasets, data, root, target, out)
    names = [dataset.name for dataset in datasets]
    _join_quarantines(out, names)
    chosen_parts = choose_parts(list(read.conversations.values()), data, plan, shares)
    parts = chosen_parts.parts
    summary: dict[str, Any] = {
        **read.counts,
        "mix": {
            name: {part: sum(read.origin[_identify_prompt(one)] == name for one in parts[part]) for part in parts}
            for name in names
        },
        **({"lineage": read.lineage} if read.lineage else {}),
    }
    if shares is not None and chosen_parts.shared is not None:
        summary["shares"] = {
            value: {
                "share": share,
                **{name: getattr(chosen_parts.shared, name).get(value, 0) for name in ("available", "taken")},
            }
            for value, share in shares.by_value.items()
        }
    if plan is not None:
        save_plan(out / WEIGHTS_FILE, plan)
        weighted = [plan.weigh(one.columns) > 1 for one in parts["train"]]
        trained = (not is_held_out(one.prompt_key, data.held_out_share) for one in read.conversations.values())
        summary |= {
            "weights": plan.identity,
            "weighted_conversations": sum(weighted),
            "weights_have_effect": any(weighted) and sum(trained) > len(parts["train"]),
        }
    chosen = Chosen("conversations", (*parts["train"], *parts["heldout"]), summary)
    return write_parts(chosen, parts, " + ".join(names), data, out)


@dataclass(frozen=True)
class _Mix:
    """Conversations of several data sets, without repetitions, and the data set in which each comes first, by id."""

    conversations: dict[str, Conversation] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    lineage: dict[str, Any] = field(default_factory=dict)


def _read_mix(datasets: Sequence[DatasetSpec], data: DataSpec, root: Path, target: TargetFiles, out: Path) -> _Mix:
    """Read the usable rows of each data set; write those that are rejected below `out`."""
    mix = _Mix()
    for dataset in datasets:
        folder = out / "rejected" / dataset.name
        folder.mkdir(parents=True, exist_ok=True)
        chosen = choose_rows(dataset, None, data.max_rejected_share, root, target, folder)
        if chosen.kind == "tokens":
            raise DataError(f"data set {dataset.name} is tokenized already: only conversations can be mixed")
        mix.counts.update({name: count for name, count in chosen.counts.items() if isinstance(count, int)})
        mix.lineage.update(chosen.counts.get("lineage", {}))
        for conversation in chosen.items:
            mix.counts["duplicates"] += conversation.id in mix.conversations
            mix.origin.setdefault(conversation.id, dataset.name)
            mix.conversations.setdefault(conversation.id, add_slice_columns(conversation, dataset.name))
    return mix


@dataclass(frozen=True)
class MixParts:
    """The parts of a mix, and what was selected by shares, if any were given."""

    parts: Mapping[Part, list[Conversation]]
    shared: SharedSelection | None = None


def choose_parts(
    conversations: Sequence[Conversation], data: DataSpec, plan: SlicePlan | None, shares: SliceShares | None = None
) -> MixParts:
    """Return the training part and the held-out part of a mix. The plan changes who is in the first, not how many; shares
    may leave some out."""
    parts = split_parts(select(conversations, data.max_conversations), data.held_out_share)
    if plan is None and shares is None:
        return MixParts(parts)
    trained = [one for one in conversations if not is_held_out(one.prompt_key, data.held_out_share)]
    if shares is None:
        return MixParts({**parts, "train": select_weighted(trained, len(parts["train"]), plan)})
    selection = select_shared(trained, len(parts["train"]), shares, plan)
    heldout = ask_both_ways(parts["heldout"]) if shares.is_of_thinking else parts["heldout"]
    return MixParts({"train": selection.conversations, "heldout": heldout}, selection)


def _identify_prompt(conversation: Conversation) -> str:
    """Return the id of a conversation before it was decided how it is asked."""
    return str(conversation.columns.get(THINKING_PAIR, conversation.id))


def _join_quarantines(out: Path, names: Sequence[str]) -> None:
    """Write the rejected rows of all data sets into one file, as of a single data set."""
    with publish_file(out / QUARANTINE_FILE) as staging, staging.open("wb") as stream:
        for name in names:
            stream.write((out / "rejected" / name / QUARANTINE_FILE).read_bytes())
    remove(out / "rejected")
