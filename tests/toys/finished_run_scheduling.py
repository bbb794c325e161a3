"""Which worker of pytest-xdist runs what: modules stay whole, and all that look at the one finished run share a worker.

The fixture `finished` takes a minute, and every worker that needs it makes its own.
"""

from __future__ import annotations

import re

from xdist.scheduler import LoadFileScheduling

_ASKS_FOR_THE_FINISHED_RUN = re.compile(r"def \w+\([^)]*\bfinished\b")


class FinishedRunScheduling(LoadFileScheduling):
    """Gives out modules one by one, those that look at the finished run as if they were one."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self._scopes: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        module = super()._split_scope(nodeid)
        if module not in self._scopes:
            asks = _ASKS_FOR_THE_FINISHED_RUN.search((self.config.rootpath / module).read_text())
            self._scopes[module] = "finished" if asks else module
        return self._scopes[module]
