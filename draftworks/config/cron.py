"""Validation of five-field cron expressions and time zones before they reach a scheduler. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from zoneinfo import ZoneInfo, available_timezones

from draftworks.storage.suggestions import suggest

ITEM = re.compile(r"(?:(?P<all>\*)|(?P<first>[0-9]+|[A-Za-z]+)(?:-(?P<last>[0-9]+|[A-Za-z]+))?)(?:/(?P<step>[0-9]+))?")
LONGEST_MONTHS = {month: 30 if month in (4, 6, 9, 11) else 31 for month in range(1, 13)} | {2: 29}


@dataclass(frozen=True)
class CronField:
    """One of the five fields of a cron expression: its name, its range, and names for its numbers."""

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()

    def parse(self, text: str) -> set[int]:
        """Return the numbers that the text of a field selects.

        Raises:
            ValueError: it is malformed, or a number is outside the range of the field.
        """
        return {value for item in text.split(",") for value in self._parse_item(item)}

    def _parse_item(self, item: str) -> range:
        found = ITEM.fullmatch(item)
        if found is None:
            raise ValueError(f"{self.name}: expected *, a number, a range a-b or a list, each with an optional /step")
        step = self._parse_number(found["step"], 1, self.high) if found["step"] else 1
        if found["all"]:
            return range(self.low, self.high + 1, step)
        first = self._parse_number(found["first"], self.low, self.high)
        last = self._parse_number(found["last"], self.low, self.high) if found["last"] else first
        if last < first:
            raise ValueError(f"{self.name}: the range {item} ends before it begins")
        return range(first, (self.high if found["step"] and not found["last"] else last) + 1, step)

    def _parse_number(self, text: str, low: int, high: int) -> int:
        named = dict(zip(self.names, range(self.low, self.high + 1)))
        number = int(text) if text.isdigit() else named.get(text.lower())
        if number is None or not low <= number <= high:
            raise ValueError(f"{self.name}: {text} is outside {low}..{high}")
        return number


MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
FIELDS = (
    CronField("minute", 0, 59),
    CronField("hour", 0, 23),
    CronField("day of month", 1, 31),
    CronField("month", 1, 12, MONTHS),
    CronField("day of week", 0, 7, WEEKDAYS),
)


def parse_cron(text: str) -> str:
    """Return a cron expression with its fields separated by single spaces.

    Raises:
        ValueError: it does not have five fields, a field is invalid, or the date never occurs (30 February).
    """
    parts = text.split()
    if len(parts) != len(FIELDS):
        names = ", ".join(field.name for field in FIELDS)
        raise ValueError(f"expected a cron expression of five fields ({names}), found {len(parts)}")
    _, _, days, months, _ = (field.parse(part) for field, part in zip(FIELDS, parts))
    if parts[4] == "*" and min(days) > max(LONGEST_MONTHS[month] for month in months):
        raise ValueError(f"no month of {sorted(months)} has a day {min(days)}: this time never occurs")
    return " ".join(parts)


def require_timezone(name: str) -> str:
    """Return `name` if it is a time zone; raise ValueError otherwise."""
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        hint = suggest(name, sorted(available_timezones())) or "expected an IANA name such as UTC or Europe/Berlin"
        raise ValueError(f"found {name[:40]!r}, which is not a time zone; {hint}") from None
    return name
