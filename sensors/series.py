"""The series of a sensor's run keys: another one begins where the cursor is empty, as after a reset in the UI.

Dagster drops a request whose key a run had before, also one that failed, for ever. So keys count how often a state was
asked for; but a count that lives in the cursor begins again with it, and would repeat the keys of before.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

_SERIES = "*"
"""Key of the series in a cursor, which no target can be named."""


@dataclass(frozen=True)
class SeriesCursor:
    """A sensor's cursor: what it remembers by name, and the series of its run keys.

    Attributes:
        series: empty in a cursor of before there were series, whose keys stay as they were.
    """

    series: str
    entries: dict[str, Any]

    @classmethod
    def read(cls, cursor: str | None) -> SeriesCursor:
        if not cursor:
            return cls(uuid.uuid4().hex[:8], {})
        entries = json.loads(cursor)
        return cls(entries.pop(_SERIES, ""), entries)

    def write(self, entries: dict[str, Any]) -> str:
        """Return the cursor with these entries and the same series."""
        return json.dumps({**entries, **({_SERIES: self.series} if self.series else {})}, sort_keys=True)

    def name_run(self, *parts: object) -> str:
        """Return the run key of these parts."""
        return ":".join(str(part) for part in (*parts, *([self.series] if self.series else [])))
