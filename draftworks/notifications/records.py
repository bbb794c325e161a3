"""Events from the records of drafts in service, of decisions and of targets on hold, since the last look."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from draftworks.decision.record import FOLDER as DECISIONS
from draftworks.decision.record import RECORD as DECISION
from draftworks.decision.record import AnswerFile, Choice, Decision, Hold, read_decision_history
from draftworks.errors import StoreError
from draftworks.notifications.channels import Channels
from draftworks.notifications.outbox import Bookmark, Event, SeenRecords, find_bookmark
from draftworks.service.register import FOLDER as SERVICE
from draftworks.service.register import REGISTER as IN_SERVICE
from draftworks.service.register import InService, ServiceRegister
from draftworks.service.rule import describe_figures

ACTIONS = {"promote": "promotion", "canary": "promotion", "rollback": "rollback", "end_canary": "rollback"}


class NumberedEvents(NamedTuple):
    """The number of the newest record, and the events of those after a number."""

    newest: int
    events: list[Event]


def find_service_events(
    var: Path, seen: dict[str, SeenRecords], warn: Callable[[str], None], quiet: bool
) -> list[Event]:
    """Return promotions and rollbacks since the last look, and bring `seen` up to date.

    Args:
        quiet: for the first look: `seen` is brought up to date, and nothing is told.
    """
    return _find(var / SERVICE, IN_SERVICE, seen, warn, quiet, lambda *name: _read_service(var, *name))


def find_decision_events(
    var: Path, seen: dict[str, SeenRecords], warn: Callable[[str], None], quiet: bool
) -> list[Event]:
    """Return decisions since the last look, and bring `seen` up to date."""
    return _find(var / DECISIONS, DECISION, seen, warn, quiet, lambda *name: _read_decisions(var, *name))


def find_hold_events(var: Path, seen: dict[str, SeenRecords], warn: Callable[[str], None], quiet: bool) -> list[Event]:
    """Return which targets were put on hold or released since the last look, and bring `seen` up to date."""
    file = AnswerFile(var)
    known = seen.get(file.path.name)
    try:
        found = file.path.stat()
        stamp = [found.st_mtime_ns, found.st_ino, found.st_size]
        if known is not None and known.stamp == stamp:
            return []
        said = file.read_events()
    except FileNotFoundError:
        return []
    except (StoreError, OSError) as error:
        warn(f"nothing is told of targets on hold: {error}")
        return []
    after = 0 if known is None else known.number
    seen[file.path.name] = SeenRecords(len(said), stamp)
    new = said[after if after <= len(said) else 0 :]
    return [] if quiet else [_make_hold_event(each) for each in new if isinstance(each, Hold)]


def _find(
    folder: Path,
    file: str,
    seen: dict[str, SeenRecords],
    warn: Callable[[str], None],
    quiet: bool,
    read: Callable[[str, str, int], NumberedEvents],
) -> list[Event]:
    """Read the records whose file has changed. A damaged one is a warning, and is read again at the next look."""
    events: list[Event] = []
    for path in sorted(folder.glob(f"*/*/{file}")):
        target, strategy = path.parent.parent.name, path.parent.name
        known = seen.get(f"{target}/{strategy}")
        try:
            found = path.stat()
            stamp = [found.st_mtime_ns, found.st_ino, found.st_size]
            if known is not None and known.stamp == stamp:
                continue
            new = read(target, strategy, 0 if known is None else known.number)
        except (StoreError, OSError, ValueError) as error:
            warn(f"nothing is told of {target}, {strategy}: {error}")
            continue
        seen[f"{target}/{strategy}"] = SeenRecords(new.newest, stamp)
        events += [] if quiet else new.events
    return events


def _read_service(var: Path, target: str, strategy: str, after: int) -> NumberedEvents:
    history = ServiceRegister(var, target, strategy).read_history()
    newest = history[-1].number if history else 0
    return NumberedEvents(
        newest, [_make_service_event(each) for each in history if _is_new(each.number, after, newest)]
    )


def _read_decisions(var: Path, target: str, strategy: str, after: int) -> NumberedEvents:
    history = read_decision_history(var, target, strategy)
    newest = history[-1].number if history else 0
    events, before = [], Choice.KEEP
    for each in history:
        # To keep the draft is news only after something else.
        if _is_new(each.number, after, newest) and (each.choice is not Choice.KEEP or before is not Choice.KEEP):
            events.append(_make_decision_event(each))
        before = each.choice
    return NumberedEvents(newest, events)


def _is_new(number: int, after: int, newest: int) -> bool:
    """Whether a record is new; all are where numbers begin anew, as their folder was removed meanwhile."""
    return number > after or newest < after


def _make_service_event(record: InService) -> Event:
    draft = record.draft.digest
    if record.canary is not None:
        title = f"{record.strategy}: canary {record.canary.draft.digest} gets {record.canary.share:.0%} beside {draft}"
    elif record.action == "end_canary":
        title = f"{record.strategy}: canary ended, draft {draft} is in service"
    else:
        before = f", before it {record.previous}" if record.previous else ""
        title = f"{record.strategy}: draft {draft} is in service{before}"
    forced = ["the rule was overruled"] if record.forced else []
    lines = [f"by {record.who}: {record.why}" if record.why else f"by {record.who}", *forced]
    return Event.make(
        ACTIONS[record.action],
        record.target,
        [record.strategy, record.number, draft, record.when],
        title,
        "\n".join([*lines, *map(describe_figures, record.figures)]),
        record.when,
    )


def _make_hold_event(hold: Hold) -> Event:
    return Event.make(
        "hold",
        hold.target,
        [hold.held, hold.at],
        "on hold: no decision starts anything" if hold.held else "released",
        hold.describe(),
        datetime.fromtimestamp(hold.at, UTC).isoformat(timespec="seconds"),
    )


def _make_decision_event(decision: Decision) -> Event:
    costs = [
        f"{name}: about {hours:g} GPU-hours"
        for name, hours in (("tune", decision.costs.tune), ("retrain", decision.costs.retrain))
        if hours is not None
    ]
    keeps = decision.choice is Choice.KEEP
    answer = [] if keeps else [f"to answer: draftworks accept {decision.target} {decision.strategy}"]
    return Event.make(
        "decision",
        decision.target,
        [decision.strategy, decision.number, decision.subject, decision.choice],
        f"{decision.strategy}: {decision.choice}, draft {decision.draft}",
        "\n".join([*decision.reasons, *costs, *answer]),
        decision.when,
    )


class RunEvents(Protocol):
    """Where events of runs come from."""

    def begin(self, bookmark: Bookmark) -> None:
        """Mark all runs that have ended as looked at."""

    def find(self, bookmark: Bookmark) -> list[Event]:
        """Return the events of runs that ended since, and bring the bookmark up to date."""
        ...


def keep_new_events(var: Path, channels: Channels, runs: RunEvents, warn: Callable[[str], None]) -> int | None:
    """Keep the events since the last look for the channels; return their number.

    The first look only marks where it begins, and returns None. Events are kept before the mark moves: a process that is
    killed between the two finds them again, and the outboxes know those that they have.

    Raises:
        StoreError: the bookmark is damaged.
    """
    bookmark = find_bookmark(var)
    if bookmark is None:
        bookmark = Bookmark()
        runs.begin(bookmark)
        _find_records(var, bookmark, warn, quiet=True)
        bookmark.save(var)
        return None
    new = channels.add([*runs.find(bookmark), *_find_records(var, bookmark, warn, quiet=False)])
    bookmark.save(var)
    return new


def _find_records(var: Path, bookmark: Bookmark, warn: Callable[[str], None], quiet: bool) -> list[Event]:
    return [
        *find_service_events(var, bookmark.service, warn, quiet),
        *find_decision_events(var, bookmark.decisions, warn, quiet),
        *find_hold_events(var, bookmark.people, warn, quiet),
    ]
