"""What `draftworks prune` costs: a survey of many results, and the removal of those that nothing refers to.

    python benchmarks/prune.py                   # 100,000 results of 1,000 targets
    python benchmarks/prune.py --results 10000 --json OUT.json

Each target has ten results of each of ten assets, one of them current; every result has four files. "plan" is what `prune`
does without --yes; "remove" is done for one target in ten, and includes a second survey.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from draftworks.config.operations import RetentionSpec
from draftworks.retention.removable import Place, RemovalPlan, plan_removal
from draftworks.retention.removal import remove_items
from draftworks.retention.survey import survey
from draftworks.storage.identity import digest

ASSETS = (
    *("conversations", "responses", "tokenized_train", "vocab_mapping", "heldout_responses"),
    *("heldout_eval_features", "eagle3_draft", "eagle3_export", "dflash_draft", "dflash_export"),
)
VERSIONS = 10
FILES = 3


@dataclass(frozen=True)
class Row:
    what: str
    items: int
    seconds: float
    cpu_seconds: float


def main(
    results: Annotated[int, typer.Option(min=100)] = 100_000,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    targets = [f"target-{number:05}" for number in range(results // len(ASSETS) // VERSIONS)]
    with tempfile.TemporaryDirectory() as folder:
        var = Path(folder)
        for target in targets:
            make_target(var, target)
        place = Place(var, RetentionSpec(keep_days=0), frozenset(targets), now=time.time() + 60)
        begun = begin()
        found = survey(place)
        plan = plan_removal(found.totals, found.candidates, {})
        rows = [end("plan", len(targets) * len(ASSETS) * VERSIONS, begun)]
        some = set(targets[::10])
        part = RemovalPlan(tuple(item for item in plan.items if item.owner in some), plan.kinds)
        begun = begin()
        done = remove_items(part, lambda: place)
        rows.append(end("remove", len(done.removed), begun))
    table = Table("", "results", "seconds", "CPU seconds")
    for row in rows:
        table.add_row(row.what, f"{row.items:,}", f"{row.seconds:.1f}", f"{row.cpu_seconds:.1f}")
    Console().print(table)
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def make_target(var: Path, target: str) -> None:
    """Write the records of one target as `ArtifactStore` does, without its fsyncs."""
    for version in range(VERSIONS):
        before = digest(["input", target, version])
        for asset in ASSETS:
            identity = {"made_from": before, "target": digest(target), "options": {"seed": version, "asset": asset}}
            folder = var / asset / target / digest(identity)
            folder.mkdir(parents=True)
            for number in range(FILES):
                (folder / f"file{number}").write_bytes(b"x" * 100)
            before = digest(["content", asset, target, version])
            record = {"schema": 1, "asset": asset, "target": target, "identity": identity, "data_version": before}
            values = {
                "files": {f"file{number}": before for number in range(FILES)},
                "created": time.time(),
                "seconds": 1.0,
            }
            (folder / "artifact.json").write_text(json.dumps({**record, **values, "summary": {}, "own_digests": []}))
            (folder.parent / "current.json").write_text(json.dumps({"schema": 1, "digest": folder.name}))


@dataclass(frozen=True)
class Begun:
    wall: float
    cpu: float


def begin() -> Begun:
    return Begun(time.perf_counter(), time.process_time())


def end(what: str, items: int, begun: Begun) -> Row:
    return Row(what, items, time.perf_counter() - begun.wall, time.process_time() - begun.cpu)


if __name__ == "__main__":
    typer.run(main)
