"""Files of data sets that are not on this machine, `s3://` and `hf://`: downloaded once into a cache in `var`. Torch-free.

    var/dataset_files/{digest}/{name}    an object of S3, by its address, version and size
    var/dataset_files/{digest}.json      names of the files of a Hugging Face data set at a commit

What is read is identified by its content, as local files are, so neither address nor cache decides a result.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from draftworks.config.dataset_urls import HubFiles, ObjectFiles, parse_dataset_url
from draftworks.config.deployment import DeploymentSpec
from draftworks.config.validation import load_yaml
from draftworks.errors import DataError
from draftworks.storage.atomic import publish_json
from draftworks.storage.hub import fetch_dataset_file, list_dataset_files
from draftworks.storage.identity import digest
from draftworks.storage.object_store import ObjectInfo, ObjectStore
from draftworks.storage.regular_files import read_json

FOLDER = "dataset_files"
DOWNLOADS = 8
_WILDCARDS = re.compile(r"\*\*/|\*\*|\*|\?|\[!?[^]]+\]")
log = logging.getLogger(__name__)


def fetch_files(url: str, root: Path) -> list[Path]:
    """Return local copies of the files at a URL, sorted by their names there; a pattern may match any number of files.

    Objects are compared with the server's versions each time; a commit of the hub is asked for once.

    Args:
        root: the registry's folder, whose deployment says how buckets are reached and where `var` is.

    Raises:
        DataError: no file there matches.
        DraftworksError: the server cannot be reached, or refuses.
    """
    path = root / "deployment.yaml"
    deployment = load_yaml(path, DeploymentSpec) if path.exists() else DeploymentSpec()
    cache = (root / deployment.var).resolve() / FOLDER
    place = parse_dataset_url(url)
    if isinstance(place, HubFiles):
        return _fetch_from_hub(url, place, cache)
    bucket = f"s3://{place.bucket}"
    objects = ObjectStore.open(bucket, deployment.object_storage.select(place.bucket))
    return fetch_objects(url, place, objects, cache)


def fetch_objects(url: str, place: ObjectFiles, objects: ObjectStore, cache: Path) -> list[Path]:
    """Return local copies of the objects that a pattern matches, see `fetch_files`."""
    wanted = [_Wanted.of(found, objects, cache) for found in _find_objects(place.pattern, objects)]
    if not wanted:
        raise DataError(f"{url} matches no object: put one there, or correct `files` of the data set")
    missing = [each for each in wanted if not each.file.exists()]
    if missing:
        size = sum(each.found.nbytes for each in missing)
        log.info("downloading %d files of %s, %.3f GB, to %s", len(missing), url, size / 1e9, cache)
    with ThreadPoolExecutor(DOWNLOADS, thread_name_prefix="download") as pool:
        list(pool.map(lambda each: objects.download(each.found.path, each.file), missing))
    return [each.file for each in wanted]


def match_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern matches, sorted. `*` matches within a folder, `**` in folders of any depth."""
    wanted = re.compile(_translate(pattern))
    return sorted(name for name in names if wanted.fullmatch(name))


@dataclass(frozen=True)
class _Wanted:
    """An object, and the file that it is kept as."""

    found: ObjectInfo
    file: Path

    @classmethod
    def of(cls, found: ObjectInfo, objects: ObjectStore, cache: Path) -> _Wanted:
        version = digest([objects.locate(found.path), found.version, found.nbytes])
        return cls(found, cache / version / found.path.rpartition("/")[2])


def _find_objects(pattern: str, objects: ObjectStore) -> list[ObjectInfo]:
    wildcard = _WILDCARDS.search(pattern)
    if wildcard is None:
        found = objects.inspect(pattern)
        return [] if found is None else [found]
    listed = {found.path: found for found in objects.list(pattern[: wildcard.start()].rpartition("/")[0])}
    return [listed[name] for name in match_names(pattern, listed)]


def _fetch_from_hub(url: str, place: HubFiles, cache: Path) -> list[Path]:
    names = [place.pattern]
    if _WILDCARDS.search(place.pattern):
        names = match_names(place.pattern, _list_hub(url, place, cache))
        if not names:
            raise DataError(f"{url} matches no file of that commit: correct `files` of the data set")
    found = []
    for name in names:
        file = fetch_dataset_file(url, place.dataset, place.commit, name)
        if file is None:
            raise DataError(f"{url}: there is no such file in that commit: correct `files` of the data set")
        found.append(file)
    return found


def _list_hub(url: str, place: HubFiles, cache: Path) -> list[str]:
    """Return the files of a commit, which never change, from the cache if they were listed before."""
    listing = cache / f"{digest([place.dataset, place.commit])}.json"
    try:
        return [str(name) for name in read_json(listing)]
    except (OSError, ValueError, TypeError):
        names = list_dataset_files(url, place.dataset, place.commit)
        publish_json(listing, names)
        return names


def _translate(pattern: str) -> str:
    """Return a pattern as a regular expression."""
    parts, end = [], 0
    for found in _WILDCARDS.finditer(pattern):
        parts.append(re.escape(pattern[end : found.start()]))
        text, end = found.group(), found.end()
        if text.startswith("["):
            inner = text[1:-1].replace("\\", r"\\")
            parts.append(f"[^/{inner[1:]}]" if inner.startswith("!") else f"[{inner}]")
        else:
            parts.append({"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}[text])
    return "".join([*parts, re.escape(pattern[end:])])
