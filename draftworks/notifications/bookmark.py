"""The newest records and runs that a tick has looked through, so that the next one reads only newer ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from draftworks.errors import StoreError
from draftworks.notifications.outbox import FOLDER
from draftworks.storage.files import publish_json, read_json

FILE = ".looked_through.json"


@dataclass
class SeenRecords:
    """The records of one target and strategy that were looked through: up to `number`, when the file was `stamp`."""

    number: int
    stamp: list[int]


@dataclass
class Bookmark:
    """The newest records and runs looked through; saved once their events are in the outboxes.

    Attributes:
        service, decisions: by `target/strategy`.
        people: what people said of targets, by the name of the file.
        runs_after: Unix time up to which runs were looked at.
        runs: those that were, and ended shortly before that, with the time.
    """

    service: dict[str, SeenRecords] = field(default_factory=dict)
    decisions: dict[str, SeenRecords] = field(default_factory=dict)
    people: dict[str, SeenRecords] = field(default_factory=dict)
    runs_after: float = 0.0
    runs: dict[str, float] = field(default_factory=dict)

    def save(self, var: Path) -> None:
        (var / FOLDER).mkdir(parents=True, exist_ok=True)
        publish_json(var / FOLDER / FILE, asdict(self))


def find_bookmark(var: Path) -> Bookmark | None:
    """Return the bookmark; None before the first look. Raises StoreError if it is damaged."""
    path = var / FOLDER / FILE
    try:
        values = read_json(path)
        seen = {
            name: {
                key: SeenRecords(int(each["number"]), [int(n) for n in each["stamp"]])
                for key, each in values[name].items()
            }
            for name in ("service", "decisions", "people")
        }
        runs = {str(run): float(at) for run, at in values["runs"].items()}
        return Bookmark(**seen, runs_after=float(values["runs_after"]), runs=runs)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(
            f"{path}: cannot be read ({error}). Remove the file: what happened until then is told no more"
        ) from None
