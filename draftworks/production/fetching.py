"""One GET request to a server that is not trusted: a time limit on the whole answer, and a limit of its size."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from draftworks.config.service import is_loopback
from draftworks.errors import EngineError
from draftworks.storage.regular_files import parse_json

MAX_METRICS_BYTES = 8 << 20
MAX_JSON_BYTES = 2 << 20
NOT_FOUND = 404
_SHOWN = 200


@dataclass(frozen=True)
class Address:
    """Where a server is, and how it is asked.

    Attributes:
        key: sent as a bearer token; never in a message.
    """

    url: str
    timeout_s: float
    key: str | None = None

    def fetch_text(self, path: str, max_bytes: int = MAX_METRICS_BYTES) -> str | None:
        """Return the body of a page as text; None if the server has no such page.

        Raises:
            EngineError: no answer, none within the time limit, a status other than 200, more than `max_bytes`, or not
                UTF-8.
        """
        import httpx

        url = f"{self.url}{path}"
        headers = {"Accept": "text/plain, application/json", "Accept-Encoding": "identity"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        deadline, body = time.monotonic() + self.timeout_s, bytearray()
        try:
            with (
                httpx.Client(timeout=self.timeout_s, trust_env=not is_loopback(url), follow_redirects=False) as client,
                client.stream("GET", url, headers=headers) as response,
            ):
                # An error page is read to its first kilobytes only, for the message.
                limit = max_bytes if response.is_success else _SHOWN * 4
                for chunk in response.iter_raw():
                    body += chunk
                    if time.monotonic() > deadline:
                        raise EngineError(f"{path}: no whole answer within {self.timeout_s:g} s")
                    if len(body) > limit:
                        if response.is_success:
                            raise EngineError(f"{path}: an answer of more than {max_bytes:,} bytes")
                        break
                status = response.status_code
        except httpx.TimeoutException:
            raise EngineError(f"{path}: no answer within {self.timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineError(f"{path}: cannot be reached: {type(error).__name__}: {error}") from None
        if status == NOT_FOUND:
            return None
        if status != httpx.codes.OK:
            raise EngineError(f"{path}: status {status}: {self._hide(bytes(body[:_SHOWN]))}")
        try:
            return body.decode()
        except UnicodeDecodeError:
            raise EngineError(f"{path}: expected text, found {bytes(body[:20])!r}") from None

    def fetch_object(self, path: str) -> dict[str, Any] | None:
        """Return the JSON object of a page; None if there is no such page. Raises EngineError as `fetch_text`."""
        text = self.fetch_text(path, MAX_JSON_BYTES)
        if text is None:
            return None
        try:
            found = parse_json(text)
        except ValueError as error:
            raise EngineError(f"{path}: expected JSON: {error}") from None
        if not isinstance(found, dict):
            raise EngineError(f"{path}: expected a JSON object, found {type(found).__name__}")
        return found

    def _hide(self, body: bytes) -> str:
        text = " ".join(body.decode(errors="replace").split())
        return text if self.key is None else text.replace(self.key, "***")
