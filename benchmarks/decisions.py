"""What a tick of the decision sensor and the leaderboard cost over many targets, in seconds of CPU.

    python benchmarks/decisions.py                    # 1,000 targets, every one of which calls for a training
    python benchmarks/decisions.py --targets 100 --json OUT.json

Each target has data of its own, a draft in service, a report, and a decision `retrain`; the budget has room for one in ten. The first
tick starts those, the second finds them without a run, and requests them again: the most that a tick has to do. As the
machine may be busy, the time to read the targets' entries alone stands beside it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated

import dagster as dg
import typer
import yaml
from rich.console import Console
from rich.table import Table

from draftworks.decision.fleet_state import FleetReader
from draftworks.decision.record import Choice, Costs, Decision, EvalLoss, Margins, Reference, save_decision
from draftworks.evaluation.report.summary import SCHEMA_VERSION
from draftworks.fleet.leaderboard import Fleet
from draftworks.service.register import REGISTER, InService, ServedDraft, ServiceRegister
from draftworks.storage.artifacts import ArtifactStore, BuildResult
from draftworks.storage.files import publish_json
from draftworks.storage.identity import FileDigests
from draftworks.targets.registry import HELDOUT, Registry
from draftworks.targets.resolve import resolve_target
from draftworks.targets.training_data import identify_eval_data
from sensors.acting import Tick, explain_tick, group_reasons
from sensors.running_targets import SeriesCursor

HOURS = 4.0
SHAPE = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")


@dataclass(frozen=True)
class Row:
    what: str
    targets: int
    cpu_seconds: float
    times_of_entries: float


def main(
    targets: Annotated[int, typer.Option(min=10)] = 1000,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        registry = make_fleet(Path(folder), targets)
        fleet, reader = Fleet.of(registry), FleetReader(registry)
        instance = dg.DagsterInstance.ephemeral()
        fleet.standings()  # digests of weights are remembered from here on
        works: dict[str, Callable[[], object]] = {
            "read all entries": lambda: [registry.load_target(name) for name in registry.list_targets()],
            "tick": lambda: tick(reader, instance),
            "leaderboard": fleet.standings,
        }
        spent: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(repeats):  # in turns: a busy machine is busy for all of them
            for name, work in works.items():
                begun = time.process_time()
                work()
                spent[name].append(time.process_time() - begun)
        instance.dispose()
    middle = {name: median(found) for name, found in spent.items()}
    rows = [Row(name, targets, each, each / middle["read all entries"]) for name, each in middle.items()]
    table = Table("", "targets", "CPU seconds", "times reading the entries")
    for row in rows:
        table.add_row(row.what, f"{row.targets:,}", f"{row.cpu_seconds:.2f}", f"{row.times_of_entries:.1f}")
    Console().print(table)
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def tick(reader: FleetReader, instance: dg.DagsterInstance) -> str:
    """Do what the sensor does."""
    found = Tick(reader, instance, time.time())
    steps, _ = found.act()
    found.request_decisions(SeriesCursor.read(None))
    return "\n".join([*group_reasons(steps), explain_tick(steps)])


def make_fleet(root: Path, count: int) -> Registry:
    """Write registry and records of a fleet, without fsyncs."""
    registry, fsync, digests = Registry(root / "registry"), os.fsync, FileDigests()
    for folder in ("targets", "datasets", "data"):
        (registry.root / folder).mkdir(parents=True)
    budget = {"budget": {"gpu_hours_per_week": count * HOURS / 10}}
    (registry.root / "deployment.yaml").write_text(yaml.safe_dump(budget))
    os.fsync = lambda handle: None
    try:
        for number in range(count):
            make_target(registry, digests, f"target-{number:05}", loss=0.2 + number / count)
    finally:
        os.fsync = fsync
    return registry


def make_target(registry: Registry, digests: FileDigests, name: str, loss: float) -> None:
    entry = {"model": f"models/{name}", "dataset": name, "service": {}, "decision": {"act": "retrain"}}
    (registry.root / "targets" / f"{name}.yaml").write_text(yaml.safe_dump(entry))
    model = registry.root / "models" / name
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(dict.fromkeys(SHAPE, 4096)))
    for file in ("model.safetensors", "tokenizer.json"):
        (model / file).write_text(f"of {name}")
    (registry.root / "datasets" / f"{name}.yaml").write_text(f"files: [data/{name}.jsonl]\n")
    (registry.root / "data" / f"{name}.jsonl").write_text(json.dumps({"messages": [], "of": name}))
    artifacts, target = ArtifactStore(registry.resolve_var_folder(), digests), registry.load_target(name)
    files = resolve_target(target, registry, digests)
    prepared = identify_eval_data(HELDOUT, target, files.vocab_size, registry, digests)
    artifacts.obtain("conversations", name, prepared.to_json(), lambda _: BuildResult("c"))
    served = publish_results(artifacts, name, {"target": files.digest, "tokenizer": files.tokenizer_digest})
    when = datetime.now(UTC).isoformat()
    draft = ServedDraft(served, f"eagle3_export/{name}/{served}", {"sglang": "f"}, "v", "w", files.digest, "r")
    record = InService(1, name, "eagle3", "promote", draft, None, None, "me", when, "")
    folder = ServiceRegister(artifacts.root, name, "eagle3").folder
    folder.mkdir(parents=True)
    publish_json(folder / REGISTER, record.to_json())
    figure = EvalLoss(
        "heldout", Choice.RETRAIN, Reference.SAME_PROMPTS, served, 2.0, 2 + loss, loss, loss, loss, 50, 50
    )
    margins, costs = Margins(0.05, 0.15, 20), Costs(1.0, HOURS)
    save_decision(
        artifacts.root,
        Decision(
            name, "eagle3", Choice.RETRAIN, served, files.digest, "s", (figure,), ("why",), margins, costs, None, when
        ),
    )


def publish_results(artifacts: ArtifactStore, target: str, made_from: dict[str, str]) -> str:
    """Publish eval data, a draft and a report of it; return the draft's digest."""

    def publish(asset: str, identity: dict, build: Callable[[Path], BuildResult] = lambda _: BuildResult("v")) -> str:
        return artifacts.obtain(asset, target, identity, build).path.name

    publish("heldout_responses", made_from)
    publish("heldout_eval_features", made_from)
    draft = publish("eagle3_draft", made_from)
    rung = {"metric": "simulated_acc_len", "value": 0.5, "temperature": None, "speed_up": None, "acceptance": None}
    walk = {**rung, "rung": 3, "metric": "rung3_walk_acc_len", "value": 1.0}
    report = {
        "schema_version": SCHEMA_VERSION,
        "target": target,
        "strategy": "eagle3",
        "eval_set": "heldout",
        "created": datetime.now(UTC).isoformat(),
        "draft_tokens": 3,
        "label_agreement": 1.0,
        "drafts": {"trained": {"rungs": [{**rung, "rung": 1}, walk]}},
        "provenance": {},
    }

    def build(out: Path) -> BuildResult:
        (out / "heldout").mkdir()
        (out / "heldout" / "report.json").write_text(json.dumps(report))
        return BuildResult("r")

    publish("eagle3_report", {"draft": "v", "draft_identity": draft, "heldout": ["v", {}], "evals": {}}, build)
    return draft


if __name__ == "__main__":
    typer.run(main)
