"""No secret of the environment, and no credential of a URL, is in a text that is shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftworks.storage.words import MASK, mask_secrets

NAMES = ("AWS_SECRET_ACCESS_KEY", "DAGSTER_PG_PASSWORD", "HF_TOKEN", "named_in_the_registry")


@given(
    name=st.sampled_from(NAMES),
    secret=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=4).filter(lambda one: one not in MASK),
    before=st.text(),
    after=st.text(),
)
def test_no_value_of_a_secret_variable_is_ever_shown(name: str, secret: str, before: str, after: str):
    shown = mask_secrets(f"{before} {secret} {after}", {name: secret}, NAMES[-1:])
    assert secret not in shown.replace(MASK, "")


def test_credentials_in_a_url_are_masked():
    shown = mask_secrets("cannot reach postgresql://me:hunter2@db:5432/x", {})
    assert "hunter2" not in shown
    assert "db:5432" in shown


def test_a_short_value_is_masked_only_where_its_variable_is_named():
    assert mask_secrets("denied: ab", {"ONE": "ab"}, ["ONE"]) == f"denied: {MASK}"
    assert mask_secrets("denied: ab", {"HF_TOKEN": "ab"}) == "denied: ab"
