"""Looks at the server behind the proxy: what it says of itself, see `draftworks.production.serving_facts`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp

from draftworks.production.serving_facts import PAGES, ServingFacts
from draftworks.storage.files import parse_json

LOOK_TIMEOUT_S = 10.0
MAX_PAGE_BYTES = 4 << 20


class EngineLook:
    """Looks at the pages of one server.

    Args:
        headers: of the looks alone, such as one with a key; never of what clients send.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
        self._session, self._url, self._headers = session, url, headers

    async def look(self) -> ServingFacts:
        """Return what the server says now; nothing is known where it does not answer."""
        return ServingFacts.of({path: await self._get(path) for path in PAGES})

    async def _get(self, path: str) -> Mapping[str, Any]:
        """Return the object of a page; empty if there is none."""
        limit = aiohttp.ClientTimeout(total=LOOK_TIMEOUT_S)
        try:
            async with self._session.get(self._url + path, headers=self._headers, timeout=limit) as answer:
                content = b""
                while answer.status == 200 and (piece := await answer.content.readany()):
                    content += piece
                    if len(content) > MAX_PAGE_BYTES:
                        return {}
                found = parse_json(content)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
