"""Resources with settings of the servers that programs start, by engine, and the path of a server's log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import dagster as dg
from pydantic import Field

from draftworks.config.capture import EngineInstallation, SGLangSpec, VLLMSpec

_TOLD_BYTES = 8 << 10


class EngineServer(dg.ConfigurableResource):
    """Settings for starting servers of an engine and waiting for them.

    The program that a step launches owns its server: it starts it on a free port of the loopback interface, waits until
    it is healthy, and ends it when the program itself ends. The server's GPUs and memory share are options of the target.
    """

    python: str = Field(description="Absolute path of the Python of the environment with the engine.")
    start_timeout_s: float = Field(default=900.0, gt=0, description="Seconds to wait until a server is ready.")
    request_timeout_s: float = Field(default=600.0, gt=0, description="Seconds to wait for an answer.")
    attempts: int = Field(default=3, ge=1, description="Attempts for one batch of a capture.")
    grace_s: float = Field(default=15.0, ge=0, description="Seconds between terminate and kill.")

    LOG_NAME: ClassVar[str]

    def _list_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in EngineInstallation.model_fields}

    @classmethod
    def locate_log(cls, folder: Path) -> Path:
        """Return the path of the log of a server whose files are in `folder`."""
        return folder / cls.LOG_NAME

    @contextmanager
    def log_output_of_server(self, context: dg.AssetExecutionContext, folder: Path) -> Iterator[None]:
        """Copy the end of the server's log to the run's log after a failure or cancellation; after a success, its path."""
        log = self.locate_log(folder)
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


class SGLangServer(EngineServer):
    """Settings for starting SGLang servers and waiting for them."""

    LOG_NAME = "sglang.log"

    @property
    def spec(self) -> SGLangSpec:
        """The same settings as a run file contains them."""
        return SGLangSpec(**self._list_settings())


class VLLMServer(EngineServer):
    """Settings for starting vLLM servers and waiting for them."""

    LOG_NAME = "vllm.log"

    @property
    def spec(self) -> VLLMSpec:
        """The same settings as a run file contains them."""
        return VLLMSpec(**self._list_settings())
