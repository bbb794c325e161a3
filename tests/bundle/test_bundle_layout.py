"""Bundles: equal input, equal digests, in both forms; whatever is altered, foreign or hostile is told."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from draftworks.bundle.layout import (
    BLOBS,
    DESCRIPTION,
    MANIFEST,
    TITLE,
    Blob,
    BundleFile,
    WrittenBundle,
    encode,
    publish_bundle,
    write_folder,
    write_layout,
)
from draftworks.bundle.reading import read_bundle
from draftworks.errors import ConfigError, StoreError

CONTENT = {
    "sglang/README.md": b"# A draft\n",
    "sglang/config.json": b"{}",
    "sglang/model.safetensors": b"weights " * 500,
}
SAID: dict[str, Any] = {
    "draft": {"strategy": "eagle3", "digest": "abcd"},
    "target": {"name": "small", "digest": "0123"},
}
FORMS: dict[str, Callable[..., WrittenBundle]] = {"layout": write_layout, "folder": write_folder}


def make_files(root: Path) -> list[BundleFile]:
    found = []
    for name, content in CONTENT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
        found.append(BundleFile(name, root / name, Blob.of(content).digest.removeprefix("sha256:")[:16]))
    return found


@pytest.fixture
def files(tmp_path: Path) -> list[BundleFile]:
    return make_files(tmp_path / "export")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


def publish(form: str, out: Path, files: list[BundleFile], link: bool = False) -> WrittenBundle:
    return publish_bundle(out, partial(FORMS[form], files=files, description=SAID, link=link))


def read_tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_both_forms_have_one_digest_and_equal_input_gives_equal_bytes(files: list[BundleFile], tmp_path: Path):
    made = {form: publish(form, tmp_path / form, files) for form in FORMS}
    assert made["layout"] == made["folder"]
    assert made["layout"].files == 3
    for form in FORMS:
        again = publish(form, tmp_path / f"{form} again", files[::-1], link=True)
        assert again == made[form]
        assert read_tree(tmp_path / form) == read_tree(tmp_path / f"{form} again")
        found = read_bundle(tmp_path / form, made[form].digest)
        assert (found.digest, found.description) == (made[form].digest, SAID)
        assert set(found.names) == {DESCRIPTION, *CONTENT}


def test_the_manifest_is_one_of_an_artifact_with_a_layer_for_each_file(files: list[BundleFile], tmp_path: Path):
    written = publish("layout", tmp_path / "out", files)
    index = json.loads((tmp_path / "out" / "index.json").read_bytes())
    [listed] = index["manifests"]
    assert listed["digest"] == written.digest
    assert listed["annotations"] == {"org.opencontainers.image.ref.name": "abcd"}
    assert json.loads((tmp_path / "out" / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    manifest = json.loads((tmp_path / "out" / BLOBS / written.digest[7:]).read_bytes())
    assert manifest["artifactType"] == "application/vnd.draftworks.draft.v1"
    content = {layer["annotations"][TITLE]: (layer["digest"], layer["size"]) for layer in manifest["layers"]}
    # Fixed digests: of what the shell's sha256sum says.
    assert content["sglang/config.json"] == (
        "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        2,
    )
    assert content["sglang/model.safetensors"][1] == 4000
    config = json.loads((tmp_path / "out" / BLOBS / manifest["config"]["digest"][7:]).read_bytes())
    assert config["config"]["Labels"]["vnd.draftworks.target-digest"] == "0123"
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in manifest["layers"]]


def test_any_altered_file_is_told(form: str, files: list[BundleFile], tmp_path: Path):
    out = tmp_path / "out"
    digest = publish(form, out, files).digest
    for path in sorted(out.rglob("*")):
        if path.is_dir() or path.name in ("oci-layout", "index.json"):
            continue
        content = path.read_bytes()
        for wrong in (content[:-1], content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]):
            path.write_bytes(wrong)
            with pytest.raises(StoreError, match="altered|expected"):
                read_bundle(out, digest)
        path.unlink()
        with pytest.raises((StoreError, ConfigError), match="cannot be read|found neither"):
            read_bundle(out, digest)
        path.write_bytes(content)
    assert read_bundle(out, digest)


def test_a_bundle_that_was_made_anew_by_others_is_told_by_its_digest_alone(
    form: str, files: list[BundleFile], tmp_path: Path
):
    ours = publish(form, tmp_path / "ours", files).digest
    files[2].source.write_bytes(b"other weights")
    other = [*files[:2], BundleFile(files[2].name, files[2].source, "")]
    publish(form, tmp_path / "theirs", other)
    assert read_bundle(tmp_path / "theirs").digest != ours
    with pytest.raises(StoreError, match=f"expected the bundle {ours}, found sha256:"):
        read_bundle(tmp_path / "theirs", ours)


def forge(out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest of a folder."""
    manifest = json.loads((out / MANIFEST).read_bytes())
    change(manifest)
    (out / MANIFEST).write_bytes(encode(manifest))


def name_layer(name: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["layers"][2]["annotations"].update({TITLE: name})


FORGED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "above": (name_layer("../outside"), "plain path inside the bundle"),
    "absolute": (name_layer("/etc/passwd"), "plain path inside the bundle"),
    "backslash": (name_layer("a\\..\\b"), "plain path inside the bundle"),
    "control": (name_layer("a\nb"), "plain path inside the bundle"),
    "empty": (name_layer(""), "plain path inside the bundle"),
    "dot": (name_layer("./sglang/config.json"), "plain path inside the bundle"),
    "twice": (name_layer("sglang/README.md"), "that of another one"),
    "no name": (name_layer(None), "has no name"),
    "own name": (name_layer(MANIFEST), "a file of its own by that name"),
    "digest": (lambda manifest: manifest["layers"][1].update(digest="sha256:../../x"), "expected a descriptor"),
    "size": (lambda manifest: manifest["layers"][1].update(size=-1), "expected a descriptor"),
    "layer": (lambda manifest: manifest.update(layers=[7]), "expected a descriptor"),
    "layers": (lambda manifest: manifest.update(layers={}), "found another one"),
    "type": (lambda manifest: manifest.update(artifactType="application/vnd.other"), "found another one"),
    "no description": (lambda manifest: manifest["layers"].pop(0), "expected a file bundle.json"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_hostile_manifest_is_refused_in_one_line(case: str, files: list[BundleFile], tmp_path: Path):
    out = tmp_path / "out"
    publish("folder", out, files)
    (tmp_path / "outside").write_bytes(CONTENT["sglang/config.json"])
    change, said = FORGED[case]
    forge(out, change)
    with pytest.raises(StoreError, match=said) as told:
        read_bundle(out)
    assert "\n" not in str(told.value)


def test_links_pipes_and_files_that_nobody_named_are_refused(files: list[BundleFile], tmp_path: Path):
    out = tmp_path / "out"
    publish("folder", out, files)
    (out / "sglang" / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(StoreError, match="does not name this file"):
        read_bundle(out)
    (out / "sglang" / "pytorch_model.bin").unlink()
    (out / "sglang" / "config.json").unlink()
    (out / "sglang" / "config.json").symlink_to(files[1].source)
    with pytest.raises(StoreError, match="found a link"):
        read_bundle(out)
    (out / "sglang" / "config.json").unlink()
    os.mkfifo(out / "sglang" / "config.json")
    with pytest.raises(StoreError, match="found a pipe|expected a file"):
        read_bundle(out)
    (out / "sglang" / "config.json").unlink()
    (out / "sglang").rename(tmp_path / "elsewhere")
    (out / "sglang").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="found a link"):
        read_bundle(out)


@pytest.mark.parametrize("name", ["../outside", "/outside", "manifest.json"])
def test_no_file_of_an_export_gets_out_of_the_bundle(form: str, name: str, files: list[BundleFile], tmp_path: Path):
    hostile = BundleFile(name, files[0].source, files[0].begin)
    with pytest.raises(StoreError, match="path inside the bundle|a file of its own"):
        publish(form, tmp_path / "a" / "out", [hostile])
    assert not (tmp_path / "a" / "out").exists()
    assert not (tmp_path / "a" / "outside").exists()


@pytest.mark.parametrize("link", [False, True])
def test_a_source_that_is_not_as_its_record_says_makes_no_bundle(
    form: str, link: bool, files: list[BundleFile], tmp_path: Path
):
    good = publish(form, tmp_path / "out", files)
    source = files[2].source
    source.write_bytes(b"altered")
    with pytest.raises(StoreError, match="altered: expected SHA-256"):
        publish(form, tmp_path / "out", files, link)
    source.unlink()
    with pytest.raises(StoreError, match="cannot be read"):
        publish(form, tmp_path / "out", files, link)
    (tmp_path / "weights").write_bytes(CONTENT[files[2].name])
    source.symlink_to(tmp_path / "weights")
    with pytest.raises(StoreError, match="found a link"):
        publish(form, tmp_path / "out", files, link)
    assert read_bundle(tmp_path / "out", good.digest)  # the former one, whole


def test_files_are_links_where_asked_and_possible(
    form: str, files: list[BundleFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def count_links(out: Path) -> int:
        inodes = {file.source.stat().st_ino for file in files}
        return sum(path.stat().st_ino in inodes for path in out.rglob("*"))

    digest = publish(form, tmp_path / "linked", files, link=True).digest
    assert count_links(tmp_path / "linked") == 3
    publish(form, tmp_path / "copied", files)
    assert count_links(tmp_path / "copied") == 0

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("another file system")

    monkeypatch.setattr(os, "link", refuse)
    publish(form, tmp_path / "refused", files, link=True)
    assert count_links(tmp_path / "refused") == 0
    assert read_bundle(tmp_path / "refused", digest)


def test_equal_files_are_one_blob_whether_copied_or_linked(tmp_path: Path):
    files = make_files(tmp_path / "export")
    twice = [*files, BundleFile("vllm/model.safetensors", files[2].source, files[2].begin)]
    digests = {publish("layout", tmp_path / str(link), twice, link).digest for link in (False, True)}
    assert len(digests) == 1
    for link in (False, True):
        assert len(list((tmp_path / str(link) / BLOBS).iterdir())) == 6  # three files, description, config, manifest
        assert read_bundle(tmp_path / str(link))
    assert files[2].source.read_bytes() == CONTENT[files[2].name]


def test_nothing_but_a_bundle_is_replaced(form: str, files: list[BundleFile], tmp_path: Path):
    home = tmp_path / "home"
    home.mkdir()
    publish(form, home, files)  # an empty folder
    digest = publish(form, home, files).digest
    assert read_bundle(home, digest)
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").write_text("years of work")
    with pytest.raises(ConfigError, match="it is not replaced"):
        publish(form, tmp_path / "precious", files)
    with pytest.raises(ConfigError, match="it is not replaced"):
        publish(form, tmp_path / "precious" / "thesis", files)
    (tmp_path / "link").symlink_to(home)
    publish(form, tmp_path / "link", files)
    assert (tmp_path / "link").is_symlink()
    assert read_bundle(home, digest)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"manifests": 3}', b'{"manifests": []}', b"\xff"])
def test_an_index_that_is_none_is_told(content: bytes, files: list[BundleFile], tmp_path: Path):
    publish("layout", tmp_path / "out", files)
    (tmp_path / "out" / "index.json").write_bytes(content)
    with pytest.raises(StoreError, match=r"index\.json"):
        read_bundle(tmp_path / "out")


def test_a_folder_without_a_bundle_is_told(tmp_path: Path):
    with pytest.raises(ConfigError, match="found neither"):
        read_bundle(tmp_path)
