"""Exchange of the draft of a running vLLM without a restart, through the plug-in beside this module and dev mode's calls."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from draftworks.config.draft_options import CONFIG, WEIGHTS
from draftworks.errors import ConfigError, EngineError
from draftworks.storage.files import publish_folder
from draftworks.storage.http_call import HttpAnswer, HttpClient, is_loopback

BACKEND = "draftworks_folder"
"""Name of the plug-in's engine; see draftworks/vllm/plugin."""
PLUGIN = Path(__file__).resolve().parent / "plugin"
"""Folder that has to be on the PYTHONPATH of the server."""


def describe_start(folder: Path) -> str:
    """Return the command, its other options left out, that starts a server whose draft in `folder` can be exchanged."""
    options = {
        "--host": "127.0.0.1",
        "--weight-transfer-config": json.dumps({"backend": BACKEND}),
        "--additional-config": json.dumps({BACKEND: str(folder.absolute())}),
    }
    words = (word for name, value in options.items() for word in (name, shlex.quote(value)))
    return " ".join(["VLLM_SERVER_DEV_MODE=1", f"PYTHONPATH={shlex.quote(str(PLUGIN))}", "vllm serve …", *words])


def exchange_draft(url: str, new: Path, served: Path, version: str, timeout_s: float) -> None:
    """Copy the draft in `new` to `served`, the folder that the server was started with, and have the server load it.

    Requests that run are answered first, others wait meanwhile; caches are emptied, since they have the former draft's
    keys and values. When the server refuses the draft, it goes on with the former one.

    Args:
        version: what the server is to say of its weights from now on (`/weight_info`).
        timeout_s: for each call, the answering of the requests that run included.

    Raises:
        ConfigError: the address is not of this machine; or `served` is not a folder with a draft.
        EngineError: the server cannot be reached, has no dev mode or no plug-in, or refused the draft.
    """
    if not is_loopback(url):
        raise ConfigError(
            f"{url}: expected an address of this machine, such as http://127.0.0.1:8000: dev mode's calls ask for no key"
        )
    if not (served / CONFIG).is_file():
        raise ConfigError(f"{served}: expected the folder of the draft that the server was started with: no {CONFIG}")
    with publish_folder(served) as staging:
        for name in (CONFIG, WEIGHTS):
            shutil.copyfile(new / name, staging / name)
    digest = hashlib.sha256((served / WEIGHTS).read_bytes()).hexdigest()
    server = _Server(url, served, timeout_s)
    server.call("/pause?mode=wait")
    try:
        server.call("/start_draft_weight_update")
        server.call("/update_weights", {"update_info": {"sha256": digest}})
        server.call("/finish_weight_update", {"weight_version": version})
    finally:
        with suppress(EngineError):
            server.call("/resume")
    found = server.call("/weight_info", method="GET").parse()
    if not isinstance(found, dict) or found.get("weight_version") != version:
        raise EngineError(f"vLLM at {url}: expected the weight version {version}, found {str(found)[:200]}")


@dataclass(frozen=True)
class _Server:
    """A server whose draft is in the folder `served`."""

    url: str
    served: Path
    timeout_s: float

    def call(self, path: str, body: Mapping[str, Any] | None = None, method: str = "POST") -> HttpAnswer:
        """Call the server by a connection of its own: vLLM closes one that it has answered with an error."""
        with HttpClient(self.url, self.timeout_s, name=f"vLLM at {self.url}") as http:
            answer = http.call(method, path, body)
        where = f"vLLM at {self.url}"
        if answer.status == HTTPStatus.NOT_FOUND or "Weight transfer not configured" in answer.text:
            raise EngineError(
                f"{where} cannot exchange its draft ({path}). Start it with {describe_start(self.served)}"
            )
        if not answer.is_success:
            raise EngineError(f"{where} refused {path} ({answer.status}) and serves the former draft: {answer.quoted}")
        return answer
