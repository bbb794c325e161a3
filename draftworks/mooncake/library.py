"""Finds the Mooncake library and its master program. Nothing else imports them."""

from __future__ import annotations

import importlib
import importlib.util
import os
from enum import IntEnum
from pathlib import Path
from types import ModuleType

from draftworks.errors import ConfigError

_QUIET = {"GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}
"""Variables by which Mooncake's programs and its library log errors only."""


class Code(IntEnum):
    """Codes that Mooncake 0.3.13 returns; what is not negative is a success, or a number of bytes."""

    NO_SPACE = -200
    INVALID = -600
    TAKEN_OVER = -601
    UNFINISHED = -703
    ABSENT = -704
    LEASED = -706
    LEASE_EXPIRED = -707
    TRANSFER_FAILED = -800
    RPC_FAILED = -900
    RPC_TIMEOUT = -901


def load_library(timeout_s: float) -> ModuleType:
    """Return the module `mooncake.store`, quiet unless the environment says otherwise.

    Args:
        timeout_s: seconds that it waits for a master or peer that is stopped, in stores that are set up from now on.

    Raises:
        ConfigError: Mooncake or one of its system libraries is not installed.
    """
    os.environ.update(build_environment())
    os.environ["MC_STORE_CLIENT_SETUP_RETRIES"] = "1"  # MooncakeClient makes the attempts
    os.environ["MC_RPC_TIMEOUT_MS"] = str(max(1, round(timeout_s * 1000)))
    os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] = os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] = str(max(1, round(timeout_s)))
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(
            f"the feature store of kind mooncake needs the library Mooncake, which cannot be imported: {error}. Install "
            "draftworks[mooncake], and of the system libibverbs1 libnl-3-200 libnl-route-3-200"
        ) from error


def find_master_program() -> Path:
    """Return the path of the program `mooncake_master`, which is in Mooncake's package. Raises ConfigError without it."""
    found = importlib.util.find_spec("mooncake")
    for folder in found.submodule_search_locations or () if found is not None else ():
        program = Path(folder) / "mooncake_master"
        if os.access(program, os.X_OK):
            return program
    raise ConfigError("mooncake_master is not installed in this environment. Install draftworks[mooncake]")


def build_environment() -> dict[str, str]:
    """Return this process's environment with Mooncake's log limited to errors, unless it is configured there."""
    return {**_QUIET, **os.environ}
