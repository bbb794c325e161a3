"""Client of an SGLang server that speculates: answers with their counters, and the server's own counters."""

from __future__ import annotations

from typing import Any

import httpx

from draftworks.errors import EngineError
from draftworks.sglang.client import GenerateRequest, SGLangClient
from draftworks.sglang.server_counters import Counters, SpeculatedAnswer


class SpeculatingClient(SGLangClient):
    """Client of one server that speculates, for any number of threads. Raises as `SGLangClient` does."""

    def answer(self, request: GenerateRequest) -> SpeculatedAnswer:
        """Return the server's answer to one prompt, with its counters."""
        body = {"rid": request.request_id, "input_ids": list(request.input_ids), "sampling_params": request.sampling}
        return SpeculatedAnswer.of(self._call("POST", "/generate", body))

    def get_raw_info(self) -> dict[str, Any]:
        """Return the whole answer of /server_info."""
        return self._call("GET", "/server_info")

    def get_counters(self) -> Counters:
        """Return the server's counters since its start, from /metrics."""
        try:
            response = self._http.get("/metrics").raise_for_status()
        except httpx.HTTPError as error:
            raise EngineError(f"SGLang at {self.url} sent no metrics: {type(error).__name__}: {error}") from error
        return Counters.of_metrics(response.text)
