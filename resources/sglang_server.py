"""How programs start the SGLang servers of a deployment, and where the servers' logs are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
from pydantic import Field

from draftworks.config.registry_files import SGLangSpec

LOG_NAME = "sglang.log"
_TOLD_BYTES = 8 << 10


class SGLangServer(dg.ConfigurableResource):
    """How servers are started and waited for. The program that a step launches owns its server: it starts it on a
    free port of the loopback interface, waits until it is healthy, and ends it with itself, however it ends.

    How much of a GPU's memory a server takes and how many GPUs is said where it is used, in the target's YAML.
    """

    python: str = Field(description="Of the environment with SGLang; an absolute path.")
    start_timeout_s: float = Field(default=900.0, gt=0, description="Until a server has to be ready.")
    request_timeout_s: float = Field(default=600.0, gt=0, description="Until it has to have answered.")
    attempts: int = Field(default=3, ge=1, description="How often a batch of a capture is tried.")
    grace_s: float = Field(default=15.0, ge=0, description="Seconds between terminate and kill.")

    @property
    def spec(self) -> SGLangSpec:
        """As run files have it."""
        return SGLangSpec(**{name: getattr(self, name) for name in SGLangSpec.model_fields})

    @staticmethod
    def log(folder: Path) -> Path:
        """The log of a server that keeps its files in `folder`."""
        return folder / LOG_NAME

    @contextmanager
    def log_output_of_server(self, context: dg.AssetExecutionContext, folder: Path) -> Iterator[None]:
        """After a failure or a cancellation the end of the server's log is in the run's log; after a success, where
        it is."""
        log = self.log(folder)
        try:
            yield
            context.log.info(f"the server's log is {log}")
        except BaseException:
            if log.is_file():
                with log.open("rb") as stream:
                    stream.seek(max(0, log.stat().st_size - _TOLD_BYTES))
                    end = stream.read().decode("utf-8", errors="replace")
                context.log.info(f"the end of {log}:\n{end}")
            raise
