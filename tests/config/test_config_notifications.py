"""Options of notifications that cannot work are refused, and none shows an address with a token."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from draftworks.config.operations import EVENT_KINDS, DeploymentSpec, NotificationSpec


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"kind": "slack"}, "either url or url_env"),
        ({"kind": "webhook", "url": "https://h", "url_env": "X"}, "either url or url_env"),
        ({"kind": "slack", "url": "https://hooks.slack.com/services/T/B/s3cr3t"}, "contains a token"),
        ({"kind": "slack", "url_env": "X", "api_key_env": "Y"}, "takes no key"),
        ({"kind": "webhook", "url": "http://example.com/hook"}, "http is for this machine alone"),
        ({"kind": "webhook", "url": "https://example.com/hook?token=s3cr3t"}, "must not contain a query"),
        ({"kind": "webhook", "url": "https://me:s3cr3t@example.com"}, "must not contain a user"),
        ({"kind": "email", "url_env": "X"}, "kind"),
        ({"kind": "webhook", "url_env": "X", "events": ["failures"]}, "events"),
        ({"kind": "webhook", "url_env": "X", "events": []}, "events"),
        ({"kind": "webhook", "url_env": "X", "name": "../up"}, "not a name"),
    ],
)
def test_what_cannot_work_is_refused(values: dict, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem) as refused:
        NotificationSpec.model_validate(values)
    assert all("s3cr3t" not in error["msg"] for error in refused.value.errors(include_input=False))


def test_channels_have_stable_names_and_no_two_the_same() -> None:
    slack = {"kind": "slack", "url_env": "TEAM"}
    first, again = (NotificationSpec.model_validate({**slack, "events": events}) for events in (["failure"], ["hold"]))
    assert first.channel == again.channel
    with pytest.raises(ValidationError, match="give each a name of its own"):
        DeploymentSpec.model_validate({"notifications": [slack, slack]})
    assert len(DeploymentSpec.model_validate({"notifications": [slack, {**slack, "name": "b"}]}).notifications) == 2


def test_everything_is_told_of_every_target_by_default() -> None:
    spec = NotificationSpec(kind="webhook", url="https://example.com")
    assert all(spec.wants(kind, target) for kind in EVENT_KINDS for target in ("one", ""))
    assert not spec.model_copy(update={"targets": ["two"]}).wants("failure", "one")
