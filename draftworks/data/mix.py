"""A mix of data sets: conversations of all of them, each once, with slice columns; weighted towards slices where a plan says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftworks.config.registry_files import DatasetSpec, DataSpec
from draftworks.config.run_files import TargetFiles
from draftworks.data.conversations import QUARANTINE_FILE, Conversation, select
from draftworks.data.prepare import Chosen, Part, choose_rows, split_parts, write_parts
from draftworks.data.slice_columns import add_slice_columns
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
) -> dict[str, Any]:
    """Read several data sets and split them together into `out/train` and `out/heldout`, as `prepare_conversations`.

    The plan weighs the training part alone: what drafts are measured on is the same with any weights.

    Raises:
        DataError: as `prepare_conversations`, or a data set that is tokenized already.
    """
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
    parts = choose_parts(list(found.values()), data, plan)
    names = [dataset.name for dataset in datasets]
    summary: dict[str, Any] = {
        **counts,
        "mix": {name: {part: sum(origin[one.id] == name for one in parts[part]) for part in parts} for name in names},
        **({"lineage": lineage} if lineage else {}),
    }
    if plan is not None:
        save_plan(out / WEIGHTS_FILE, plan)
        weighted = [plan.weigh(one.columns) > 1 for one in parts["train"]]
        available = sum(not is_held_out(name, data.held_out_share) for name in found)
        summary |= {
            "weights": plan.identity,
            "weighted_conversations": sum(weighted),
            "weights_have_effect": any(weighted) and available > len(parts["train"]),
        }
    chosen = Chosen("conversations", (*parts["train"], *parts["heldout"]), summary)
    return write_parts(chosen, parts, " + ".join(names), data, out)


def choose_parts(
    conversations: Sequence[Conversation], data: DataSpec, plan: SlicePlan | None
) -> Mapping[Part, list[Conversation]]:
    """Return the training part and the held-out part of a mix; the plan changes who is in the first, not how many."""
    parts = split_parts(select(conversations, data.max_conversations), data.held_out_share)
    if plan is None:
        return parts
    trained = [one for one in conversations if not is_held_out(one.id, data.held_out_share)]
    return {"train": select_weighted(trained, len(parts["train"]), plan), "heldout": parts["heldout"]}


def _join_quarantines(out: Path, names: Sequence[str]) -> None:
    """Write the rejected rows of all data sets into one file, as of a single data set."""
    with publish_file(out / QUARANTINE_FILE) as staging, staging.open("wb") as stream:
        for name in names:
            stream.write((out / "rejected" / name / QUARANTINE_FILE).read_bytes())
    remove(out / "rejected")
