"""Promotions with `service: {bundle: true}`: the record names a bundle that is whole, and retention keeps it with its draft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bundle_site import BundleSite

from draftworks.bundle.layout import BLOBS
from draftworks.bundle.reading import read_bundle
from draftworks.errors import StoreError
from draftworks.retention.removable import list_served
from draftworks.service.candidate import RefusedError
from draftworks.service.register import InService, ServedDraft


@pytest.fixture
def site(tmp_path: Path) -> BundleSite:
    return BundleSite(tmp_path, entry={"service": {"bundle": True}})


def read_named(site: BundleSite) -> str:
    """The digest of the draft in the bundle that `in_service.json` names, which is whole."""
    values = json.loads((site.open().register.folder / "in_service.json").read_text())
    found = read_bundle(site.root / "var" / values["bundle"]["path"], values["bundle"]["digest"])
    assert found.description["draft"]["digest"] == values["digest"]
    return values["digest"]


def test_the_record_names_the_bundle_of_its_draft_forth_and_back(site: BundleSite):
    first = site.publish("a", 1.0)
    site.promote()
    assert read_named(site) == first
    second = site.publish("b", 1.5)
    record = site.promote()
    assert read_named(site) == second
    assert record.draft.bundle is not None
    assert site.root / "var" / record.draft.bundle.path in {
        path / "oci" for path in list_served(site.root / "var").whole
    }
    site.rollback()
    assert read_named(site) == first


def test_it_is_made_once_and_again_if_it_was_damaged(site: BundleSite):
    site.publish("a", 1.0)
    named = site.promote().draft.bundle
    service = site.open()
    assert named is not None
    assert service.bundle(service.register.require().draft) == named
    folder = site.root / "var" / named.path
    weights = max((folder / BLOBS).iterdir(), key=lambda path: path.stat().st_size)
    weights.unlink()
    assert service.bundle(service.register.require().draft) == named
    assert read_bundle(folder, named.digest)


def test_a_rollback_names_no_bundle_that_was_pruned(site: BundleSite):
    site.publish("a", 1.0)
    pruned = site.promote().draft.bundle
    site.publish("b", 1.5)
    site.promote()
    assert pruned is not None
    (site.root / "var" / pruned.path).rename(site.root / "gone")
    assert site.rollback().draft.bundle is None


def test_no_bundle_is_made_for_other_weights_or_from_a_report_that_is_gone(site: BundleSite):
    site.publish("a", 1.0)
    served = site.promote().draft
    with pytest.raises(StoreError, match="its eagle3_report gone is not there any more"):
        site.open().find_subject(ServedDraft(**{**vars(served), "report": "gone"}))
    site.add_target("small", weights="second")
    with pytest.raises(RefusedError, match="was trained for the weights"):
        site.open().find_subject(served)


@pytest.mark.parametrize("path", ["/etc", "../outside", ""])
def test_a_record_whose_bundle_is_elsewhere_is_refused(site: BundleSite, path: str):
    site.publish("a", 1.0)
    values = site.promote().to_json()
    assert InService.from_json(values, "here").draft.bundle is not None
    with pytest.raises(StoreError, match="not inside the folder of results"):
        InService.from_json({**values, "bundle": {"digest": "sha256:0", "path": path}}, "here")


def test_records_from_before_there_were_bundles_are_read(site: BundleSite):
    site.publish("a", 1.0)
    values = site.promote().to_json()
    del values["bundle"]
    assert InService.from_json(values, "here").draft.bundle is None
