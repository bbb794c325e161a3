"""Which worker of pytest-xdist runs what: modules stay whole, and all that share a costly fixture share a worker.

The finished run takes a minute, a server of real SGLang half of one, and every worker that needs it makes its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from xdist.scheduler import LoadFileScheduling


class SharedFixtureScheduling(LoadFileScheduling):
    """Gives out modules one by one, those with a test that asks for the same one of `shared` as if they were one."""

    def __init__(self, config: pytest.Config, log: object, shared: Iterable[str]) -> None:
        super().__init__(config, log)
        self._asks = re.compile(rf"def \w+\([^)]*\b({'|'.join(shared)})\b")
        self._scopes: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        module = super()._split_scope(nodeid)
        if module not in self._scopes:
            asks = self._asks.search((self.config.rootpath / module).read_text())
            self._scopes[module] = asks[1] if asks else module
        return self._scopes[module]
