"""A mix of data sets: conversations of all of them, each once, with slice columns; by weights and shares of slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftworks.config.registry_files import DatasetSpec, DataSpec
from draftworks.config.run_files import TargetFiles
from draftworks.data.chat import ChatTokenizer
from draftworks.data.conversations import QUARANTINE_FILE, Conversation, select
from draftworks.data.prepare import Chosen, Part, choose_rows, split_parts, write_parts
from draftworks.data.slice_columns import THINKING_PAIR, add_slice_columns, ask_both_ways
from draftworks.data.slice_shares import SharedSelection, SliceShares, select_shared
from draftworks.data.slice_weights import WEIGHTS_FILE, SlicePlan, save_plan, select_weighted
from draftworks.data.split import is_held_out
from draftworks.errors import DataError
from draftworks.storage.atomic import publish_file, remove


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
    found: dict[str, Conversation] = {}
    origin: dict[str, str] = {}
    counts: Counter[str] = Counter()
    lineage: dict[str, Any] = {}
    for dataset in datasets:
        folder = out / "rejected" / dataset.name
        folder.mkdir(parents=True, exist_ok=True)
        chosen = choose_rows(dataset, None, data.max_rejected_share, root, target, folder)
        if chosen.kind == "tokens":
            raise DataError(f"data set {dataset.name} is tokenized already: only conversations can be mixed")
        counts.update({name: count for name, count in chosen.counts.items() if isinstance(count, int)})
        lineage |= chosen.counts.get("lineage", {})
        for conversation in chosen.items:
            counts["duplicates"] += conversation.id in found
            origin.setdefault(conversation.id, dataset.name)
            found.setdefault(conversation.id, add_slice_columns(conversation, dataset.name))
    _join_quarantines(out, [dataset.name for dataset in datasets])
    chosen_parts = choose_parts(list(found.values()), data, plan, shares)
    parts = chosen_parts.parts
    names = [dataset.name for dataset in datasets]
    summary: dict[str, Any] = {
        **counts,
        "mix": {
            name: {part: sum(origin[_identify_prompt(one)] == name for one in parts[part]) for part in parts}
            for name in names
        },
        **({"lineage": lineage} if lineage else {}),
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
        available = sum(not is_held_out(one.prompt_key, data.held_out_share) for one in found.values())
        summary |= {
            "weights": plan.identity,
            "weighted_conversations": sum(weighted),
            "weights_have_effect": any(weighted) and available > len(parts["train"]),
        }
    chosen = Chosen("conversations", (*parts["train"], *parts["heldout"]), summary)
    return write_parts(chosen, parts, " + ".join(names), data, out)


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
