"""Objects are created once, swapped by condition and read in full, or the reason is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from draftworks.config.features import BucketAccess, ObjectStorageSpec
from draftworks.errors import ConfigError
from draftworks.storage.object_access import MissingObjectError, ObjectStorageError, explain, parse_object_url
from draftworks.storage.object_store import ByteRange, ObjectStore


@pytest.fixture(params=["memory", "folder"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    from obstore.store import LocalStore, MemoryStore

    store = MemoryStore() if request.param == "memory" else LocalStore(tmp_path)
    return ObjectStore(store, "s3://toys/some/prefix", "some/prefix", retry_s=0)


def test_an_object_is_created_once(objects: ObjectStore):
    assert objects.find("a") is None
    assert objects.create("a", b"first")
    assert not objects.create("a", b"second")
    assert objects.read("a").content == b"first"


def test_a_pointer_is_swapped_by_whoever_has_seen_the_newest(objects: ObjectStore):
    assert objects.swap("pointer", b"1", None)
    assert not objects.swap("pointer", b"2", None)
    first = objects.read("pointer")
    assert objects.swap("pointer", b"3", first.version)
    assert not objects.swap("pointer", b"4", first.version)
    assert objects.read("pointer").content == b"3"


def test_ranges_are_read_in_full_or_refused(objects: ObjectStore):
    objects.create("a", bytes(range(100)))
    found = objects.read_ranges("a", [ByteRange(0, 3), ByteRange(50, 51)])
    assert [bytes(each) for each in found] == [b"\x00\x01\x02", b"\x32"]
    with pytest.raises(
        ObjectStorageError, match=r"s3://toys/some/prefix/a is truncated: expected bytes 90 to 110, found"
    ):
        objects.read_ranges("a", [ByteRange(0, 3), ByteRange(90, 110)])
    with pytest.raises(MissingObjectError, match="s3://toys/some/prefix/b: there is no such object"):
        objects.read_ranges("b", [ByteRange(0, 3)])


def test_paths_are_those_below_the_url(objects: ObjectStore):
    inner = objects.inside("deep")
    inner.create("x/y", b"1")
    inner.create("z", b"22")
    assert [(each.path, each.nbytes) for each in inner.list()] == [("x/y", 1), ("z", 2)]
    assert [each.path for each in objects.list("deep/x")] == ["deep/x/y"]
    assert objects.locate("deep/z") == inner.locate("z") == "s3://toys/some/prefix/deep/z"
    inner.remove(["z", "never there"])
    assert [each.path for each in objects.list()] == ["deep/x/y"]
    assert inner.inspect("z") is None


def test_files_go_up_and_come_down(objects: ObjectStore, tmp_path: Path):
    (tmp_path / "up").write_bytes(b"content")
    objects.upload("file", tmp_path / "up")
    objects.upload("file", tmp_path / "up")
    objects.download("file", tmp_path / "down" / "file")
    assert (tmp_path / "down" / "file").read_bytes() == b"content"
    with pytest.raises(MissingObjectError):
        objects.download("none", tmp_path / "down" / "none")
    assert [path.name for path in (tmp_path / "down").iterdir()] == ["file"]


def test_what_can_be_written_to_is_left_as_it_was(objects: ObjectStore):
    objects.require_writable()
    assert list(objects.list()) == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("RequestTimeTooSkewed", "the clocks of this machine and of the server differ too much"),
        ("SignatureDoesNotMatch", "the server does not accept these keys"),
        ("ExpiredToken", "the server does not accept these keys"),
        ("AccessDenied", "these keys may not write here"),
        ("NoSuchBucket", "there is no such bucket"),
    ],
)
def test_refusals_of_a_server_are_said_for_a_person(code: str, words: str):
    from obstore.exceptions import PermissionDeniedError

    error = explain(PermissionDeniedError(f"<Code>{code}</Code>"), "write", "s3://toys", "s3://toys/a", 0.1)
    assert words in str(error)
    assert "\n" not in str(error)


class Forgetful(ObjectStore):
    """A server that ignores conditions."""

    def create(self, path: str, content: bytes | bytearray | memoryview) -> bool:
        self.remove([path])
        return super().create(path, content)


def test_a_server_that_ignores_conditions_is_refused():
    from obstore.store import MemoryStore

    with pytest.raises(ConfigError, match="ignores conditions"):
        Forgetful(MemoryStore(), "s3://toys", retry_s=0).require_writable()


@pytest.mark.parametrize(
    "url", ["s3://", "s3:/bucket/x", "https://bucket/x", "s3://b/x", "s3://bucket/a//b", "s3://bucket/../x"]
)
def test_a_url_that_is_none_is_refused(url: str):
    with pytest.raises(ValueError, match="expected a p"):
        parse_object_url(url)


@pytest.mark.parametrize("url", ["s3://key:hidden@bucket/x", "s3://bucket/x?secret=hidden"])
def test_keys_in_a_url_are_refused_and_not_repeated(url: str):
    with pytest.raises(ValueError, match="must not contain keys") as refused:
        parse_object_url(url)
    with pytest.raises(ConfigError) as opened:
        ObjectStore.open(url, BucketAccess())
    assert "hidden" not in str(refused.value) + str(opened.value)


def test_a_bucket_is_reached_as_its_own_entry_says_or_as_all_are():
    spec = ObjectStorageSpec(endpoint="http://a:1", region="r", buckets={"mine": BucketAccess(anonymous=True)})
    assert spec.select("mine") == BucketAccess(anonymous=True)
    assert spec.select("other") == BucketAccess(endpoint="http://a:1", region="r")


def test_missing_keys_are_named_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ONE", "its value")
    monkeypatch.delenv("TWO", raising=False)
    access = BucketAccess(access_key_env="ONE", secret_key_env="TWO")
    with pytest.raises(ConfigError, match="s3://bucket/x: the environment has no TWO: set it") as told:
        ObjectStore.open("s3://bucket/x", access)
    assert "its value" not in str(told.value)


def test_a_server_that_is_not_there_is_said_within_the_bound_and_keys_are_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    access = BucketAccess(endpoint="http://127.0.0.1:9", retry_s=0.5)
    objects = ObjectStore.open("s3://bucket/x", access)
    with pytest.raises(ObjectStorageError, match=r"s3://bucket/x/a: the server could not be reached.*endpoint") as told:
        objects.read("a")
    shown = f"{told.value} {objects!r} {told.value.__cause__} {access!r}"
    assert "the-key" not in shown
    assert "the-secret" not in shown


def test_a_missing_library_is_one_error_that_names_its_installation():
    script = """
import sys
sys.modules["obstore"] = sys.modules["obstore.store"] = None
from draftworks.config.features import BucketAccess
from draftworks.errors import ConfigError
from draftworks.storage.object_store import ObjectStore
try:
    ObjectStore.open("s3://bucket/x", BucketAccess())
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install -e '.[s3]'" in done.stdout
