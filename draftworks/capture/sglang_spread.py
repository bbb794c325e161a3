"""Several SGLang servers behind one engine: each batch is shared among them, and a server that fails is done without."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from draftworks.capture.sglang_hosts import SGLangHost
from draftworks.errors import EngineError
from draftworks.serving.circuit_breaker import CircuitBreaker
from draftworks.serving.sglang_client import GenerateRequest, Generation
from draftworks.serving.spreading import Spread

log = logging.getLogger(__name__)


class SpreadHost(SGLangHost):
    """Servers that run the same target and capture the same layers.

    Args:
        hosts: closed by `close`.
        spool: where the hidden states of all of them are found; the folder they write to, or one on the same disk.
        max_outstanding: requests that one server has at a time.
        mends: whether the hosts' own `revive` brings a server back that ended. Then it is called for one that failed too
            often, while the others go on.
        new_breaker: makes the breaker of each.

    Raises:
        EngineError: they capture different layers.
    """

    def __init__(
        self,
        hosts: Sequence[SGLangHost],
        spool: Path,
        max_outstanding: int,
        mends: bool,
        new_breaker: Callable[[], CircuitBreaker] = CircuitBreaker,
    ) -> None:
        self.layer_ids = _common_layers(hosts)
        self.spool = spool
        self.replicas = len(hosts)
        self.client = _SpreadClient(self)
        self._hosts = tuple(hosts)
        self._mends = mends
        self._closing = False
        named = {f"server {number} of {len(hosts)}": host for number, host in enumerate(hosts, start=1)}
        self._spread = Spread(named, max_outstanding, new_breaker, self._mend)
        self._senders = ThreadPoolExecutor(len(hosts), thread_name_prefix="spread")
        self._menders = ThreadPoolExecutor(len(hosts), thread_name_prefix="mend")

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(host.client.url for host in self._hosts)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Answers in the order of the requests, which are shared out by their tokens. Errors as `Spread.run`."""
        if self._closing:
            raise EngineError("SGLang is no longer ours to ask: the engine was closed")
        shares = balanced([len(request.input_ids) for request in requests], self.replicas)
        if len(shares) == 1:
            return self._generate(requests)
        futures = [self._senders.submit(self._generate, [requests[index] for index in share]) for share in shares]
        wait(futures)  # all of them: nothing may appear in the spool after an error
        answers: list[Generation | None] = [None] * len(requests)
        for share, future in zip(shares, futures, strict=True):
            for index, answer in zip(share, future.result(), strict=True):
                answers[index] = answer
        return [answer for answer in answers if answer is not None]

    def revive(self, error: EngineError) -> None:
        """All have failed, and whoever asked has waited: ask all of them again."""
        log.warning("%s\nTrying all of them again", error)
        self._spread.reopen()

    def close(self) -> None:
        self._closing = True
        for host in self._hosts:
            host.close()
        self._senders.shutdown(wait=False)
        self._menders.shutdown(wait=True, cancel_futures=True)
        for host in self._hosts:
            host.close()  # one that was being mended has come back meanwhile

    def _generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        def ask(host: SGLangHost) -> list[Generation]:
            answers = host.client.generate(requests)
            if host.spool != self.spool:
                _gather(host.spool, self.spool, [request.request_id for request in requests])
            return answers

        return self._spread.run(ask, len(requests))

    def _mend(self, host: SGLangHost, error: EngineError) -> None:
        if self._mends and not self._closing:
            self._menders.submit(self._mended, host, error)

    def _mended(self, host: SGLangHost, error: EngineError) -> None:
        if self._closing:
            return
        try:
            host.revive(error)
        except EngineError as failure:
            log.error("a server could not be started again, the others go on without it: %s", failure)
        else:
            self._spread.reopen(host)


class _SpreadClient:
    """What an engine takes for a server's client."""

    def __init__(self, host: SpreadHost) -> None:
        self._host = host

    @property
    def url(self) -> str:
        return ", ".join(self._host.urls)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        return self._host.generate(requests)


def balanced(weights: Sequence[int], shares: int) -> list[list[int]]:
    """Indices of the weights in at most `shares` groups of about the same sum, none empty; one empty group for no weights."""
    groups: list[list[int]] = [[] for _ in range(max(min(shares, len(weights)), 1))]
    sums = [0] * len(groups)
    for index in sorted(range(len(weights)), key=lambda each: -weights[each]):
        lightest = sums.index(min(sums))
        groups[lightest].append(index)
        sums[lightest] += weights[index]
    return groups


def _gather(source: Path, spool: Path, request_ids: Sequence[str]) -> None:
    spool.mkdir(parents=True, exist_ok=True)
    for request_id in request_ids:
        for path in source.glob(f"{request_id}.*"):
            os.replace(path, spool / path.name)


def _common_layers(hosts: Sequence[SGLangHost]) -> tuple[int, ...]:
    found = {host.layer_ids for host in hosts}
    if len(found) > 1:
        each = "; ".join(f"{host.client.url}: {list(host.layer_ids)}" for host in hosts)
        raise EngineError(
            f"servers that share the work have to capture the same layers, found {each}. Start all of them with the same "
            "--return-aux-hidden-state-layer-ids"
        )
    return found.pop()
