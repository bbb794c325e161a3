"""The files of a registry data set, local or remote, and their identity. Torch-free; no file is parsed."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from draftworks.config.data import ServedSpec
from draftworks.config.operations import DeploymentSpec
from draftworks.config.registry_files import DatasetSpec
from draftworks.config.strict_yaml import load_yaml
from draftworks.config.urls import HubFiles, ObjectFiles, is_url, parse_dataset_url
from draftworks.data.served.secrets import REVISION, digest_hook
from draftworks.errors import DataError
from draftworks.storage.files import publish_json, read_json
from draftworks.storage.hub import fetch_dataset_file, list_dataset_files
from draftworks.storage.identity import FileDigests, digest
from draftworks.storage.object_store import ObjectInfo, ObjectStore

ROWS_REVISION = 3
"""Increased when the same rows become other conversations: 3 reads prompts without answers, `system`, `attention_mask`, thoughts
kept apart and which turns are learnt."""
SERVED = "served"
"""The format of data sets of served prompts."""
SUFFIXES = (".jsonl", ".json", ".parquet")


def find_dataset_files(spec: DatasetSpec, root: Path) -> list[Path]:
    """Return the files of a data set. Logs of served prompts may have any suffix; otherwise as `find_files`."""
    return find_files(spec.files, root, any_suffix=spec.format == SERVED)


def find_files(patterns: Sequence[str], root: Path, any_suffix: bool = False) -> list[Path]:
    """Return the files of all globs relative to `root` and of all URLs, each once, sorted within a glob.

    What exists under a name with `*`, `?` or brackets is meant literally; nothing in the name of `root` is a pattern.

    Files of `s3://` and `hf://` are downloaded unless they were before, see `remote_files`.

    Raises:
        DataError: a pattern matches no file, or a file of an unknown kind.
        DraftworksError: files cannot be downloaded.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        if is_url(pattern):
            fetched = fetch_files(pattern, root)
            found |= dict.fromkeys(fetched if any_suffix else _require_known_kinds(fetched))
            continue
        files = [path for path in _match(pattern, root) if path.is_file()]
        if not files:
            raise DataError(
                f"{pattern!r} matches no file below {root}: put one there, or correct `files` of the data set"
            )
        found |= dict.fromkeys(files if any_suffix else _require_known_kinds(files))
    return list(found)


def _match(pattern: str, root: Path) -> list[Path]:
    """Return what a glob matches, sorted. Where its brackets match nothing, they are those of a name."""
    literal = _escape_existing(pattern, root)
    names = glob.glob(literal, root_dir=root, recursive=True)
    if not names and "[" in literal:
        names = glob.glob(literal.replace("[[]", "[").replace("[", "[[]"), root_dir=root, recursive=True)
    return sorted(root / name for name in names)


def _escape_existing(pattern: str, root: Path) -> str:
    """Return the pattern in which the longest first part that exists under just this name matches itself alone."""
    parts = Path(pattern).parts
    count = next((n for n in range(len(parts), 0, -1) if os.path.lexists(root.joinpath(*parts[:n]))), 0)
    return os.path.join("", *map(glob.escape, parts[:count]), *parts[count:])


def _require_known_kinds(files: list[Path]) -> list[Path]:
    for path in files:
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(f"{path}: expected one of {', '.join(SUFFIXES)}, found {path.suffix or 'no suffix'!r}")
    return files


def digest_dataset(spec: DatasetSpec, root: Path, digests: FileDigests, contents: Sequence[str] | None = None) -> str:
    """Return the digest of the files' contents and of how they are read; names and places do not matter.

    Of served prompts the redaction counts too, and the name, which is a slice column's default.

    Args:
        contents: digests of what is read, where that is not the whole of the files.
    """
    if contents is None:
        contents = sorted(digests.of_file(path) for path in find_dataset_files(spec, root))
    if spec.format != SERVED:
        return digest([spec.format, contents, ROWS_REVISION])
    served = spec.served or ServedSpec()
    redaction = digest_hook(served.redaction, root, digests)
    return digest([spec.format, contents, spec.name, served.to_identity(), redaction, REVISION, ROWS_REVISION])


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
