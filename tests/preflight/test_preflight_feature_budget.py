"""Features that are likely not to fit are a warning: how long answers are is known only later."""

from __future__ import annotations

import pytest
import yaml


def budget_warnings(fleet, **entry) -> list[str]:
    fleet.write(**entry)
    found = fleet.check()
    assert found.errors == []
    return [text for text in found.warnings if "capture.budget_gb" in text or "GB left" in text]


def test_more_than_the_budget_is_told_for_each_set(fleet):
    told = budget_warnings(fleet, capture={"budget_gb": 1e-6})
    assert any("training_features will take about" in text for text in told)
    assert all("more than 1e-06 GB is refused" in text for text in told)


@pytest.mark.parametrize("entry", [{}, {"strategies": {}}, {"capture": {"budget_gb": 1e-6}, "streaming": {}}])
def test_what_fits_or_is_not_stored_is_not_told(fleet, entry):
    assert not [text for text in budget_warnings(fleet, **entry) if "training_features" in text]


def test_more_than_the_disk_has_is_told_unless_another_store_holds_it(fleet, monkeypatch):
    class Full:
        free = 1000

    monkeypatch.setattr("draftworks.preflight.streams.shutil.disk_usage", lambda path: Full)
    (told,) = budget_warnings(fleet)
    assert "its features will take about" in told
    s3 = {
        "features": {"kind": "s3", "url": "s3://drafts/features"},
        "object_storage": {"endpoint": "http://127.0.0.1:9"},
    }
    (fleet.registry.root / "deployment.yaml").write_text(yaml.safe_dump(s3))
    fleet.write()
    assert not [text for text in fleet.check().warnings if "GB left" in text]
