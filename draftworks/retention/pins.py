"""Pins: results that are kept until a person says otherwise."""

from __future__ import annotations

import getpass
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from draftworks.errors import StoreError
from draftworks.storage.artifacts import RECORD, ArtifactStore
from draftworks.storage.atomic import publish_json
from draftworks.storage.names import require_name
from draftworks.storage.regular_files import read_json
from draftworks.storage.result_names import choose_name, read_names
from draftworks.storage.suggestions import suggest_or_list

FOLDER = "pins"
"""In `var`: `ASSET/TARGET/DIGEST.json` for each pin."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pin:
    """A result that is kept, with all that it was made from.

    Attributes:
        digest: of the result's identity: the name of its folder.
        when: seconds since the epoch.
    """

    asset: str
    target: str
    digest: str
    who: str
    why: str
    when: float

    @property
    def result(self) -> Path:
        """Its folder below `var`."""
        return Path(self.asset, self.target, self.digest)


def pin_result(artifacts: ArtifactStore, asset: str, target: str, digest: str | None, why: str) -> Pin:
    """Keep a result: that of a digest or its begin, by default the newest.

    Raises:
        StoreError: there is no such result.
    """
    _require_asset(artifacts.root, asset, target)
    if digest is None:
        digest = artifacts.load_current(asset, target).path.name
    try:
        digest = choose_name(digest, read_names(artifacts.list_all(asset, target)), "result")
    except StoreError as error:
        raise StoreError(f"{asset} of target {target}: {error}") from None
    pin = Pin(asset, target, digest, _name_user(), why, time.time())
    path = _locate(artifacts.root, pin.asset, pin.target, pin.digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    publish_json(path, {"schema": 1, **asdict(pin)})
    return pin


def unpin_result(var: Path, asset: str, target: str, digest: str) -> None:
    """Remove the pin of a result, by its digest or its begin. Raises StoreError if there is none."""
    _require_asset(var, asset, target)
    pinned = dict.fromkeys(path.stem for path in _locate(var, asset, target, "any").parent.glob("*.json"))
    try:
        _locate(var, asset, target, choose_name(digest, pinned, "pinned result")).unlink()
    except (FileNotFoundError, StoreError) as error:
        raise StoreError(f"{asset} {digest} of target {target} is not pinned: {error}") from None


def _require_asset(var: Path, asset: str, target: str) -> None:
    """Raise StoreError for an asset or target of which nothing was ever made, with the closest of those that were."""
    if (var / asset / target).is_dir():
        return
    assets = [path.name for path in var.glob("*/") if any(path.glob(f"*/*/{RECORD}"))]
    if asset not in assets:
        raise StoreError(f"no asset {asset[:40]!r} was made yet; {suggest_or_list(asset, assets)}")
    targets = [path.name for path in (var / asset).glob("*/")]
    raise StoreError(f"{asset} was not made for a target {target[:40]!r}; {suggest_or_list(target, targets)}")


def list_pins(var: Path) -> list[Pin]:
    """Return all pins.

    Raises:
        StoreError: a pin cannot be read. What it keeps is not known, so nothing can be removed safely.
    """
    return [_read(path) for path in sorted((var / FOLDER).glob("*/*/*.json")) if not path.name.startswith(".")]


def _read(path: Path) -> Pin:
    try:
        values = read_json(path)
        if values.pop("schema") != 1:
            raise ValueError("expected schema 1")
        pin = Pin(**values)
        if _locate(Path(), pin.asset, pin.target, pin.digest).parts != path.parts[-4:]:
            raise ValueError("it names another result than its path does")
        return pin
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path}: not a pin ({error}). Remove the file, or pin the result again") from error


def _locate(var: Path, asset: str, target: str, digest: str) -> Path:
    return var / FOLDER / require_name(asset) / require_name(target) / f"{require_name(digest)}.json"


def _name_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "unknown"
