"""Debian's skopeo, which shares no code with us, reads the layouts and copies them byte for byte."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path

import pytest
from bundle_site import BundleSite
from postgres_server import PACKAGES

from draftworks.bundle.reading import read_bundle

pytestmark = pytest.mark.cluster


def skopeo(*words: object) -> bytes:
    libraries = [PACKAGES / part / f"{platform.machine()}-linux-gnu" for part in ("usr/lib", "lib")]
    command = [PACKAGES / "usr" / "bin" / "skopeo", "--insecure-policy", *map(str, words)]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, libraries))}
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout


def test_skopeo_inspects_the_bundle_and_copies_equal_bytes(tmp_path: Path):
    site = BundleSite(tmp_path, entry={"service": {"bundle": True}})
    draft = site.publish("a", 1.0)
    named = site.promote().draft.bundle
    assert named is not None
    layout = site.root / "var" / named.path
    said = json.loads(skopeo("inspect", f"oci:{layout}"))
    assert said["Digest"] == named.digest
    assert said["Labels"]["vnd.draftworks.draft"] == draft
    manifest = json.loads(skopeo("inspect", "--raw", f"oci:{layout}:{draft}"))
    assert [layer["digest"] for layer in manifest["layers"]] == said["Layers"]
    skopeo("copy", f"oci:{layout}", f"dir:{tmp_path / 'flat'}")
    for layer in manifest["layers"]:
        name = layer["digest"].removeprefix("sha256:")
        assert (tmp_path / "flat" / name).read_bytes() == (layout / "blobs" / "sha256" / name).read_bytes()
    skopeo("copy", f"oci:{layout}", f"oci:{tmp_path / 'copied'}:any")
    assert read_bundle(tmp_path / "copied", named.digest).names == read_bundle(layout).names
