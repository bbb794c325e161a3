"""Findings: each mistake is one line, whether it was looked for or raised."""

from __future__ import annotations

import pytest

from draftworks.errors import ConfigError, DataError
from draftworks.preflight.findings import Findings


@pytest.mark.parametrize("error", [ConfigError, DataError])
def test_an_error_of_several_lines_is_as_many_findings(error):
    findings = Findings()
    with findings.collect_errors():
        raise error("a: unknown key\nb: expected a number")
    assert findings.errors == ["a: unknown key", "b: expected a number"]


def test_what_is_no_error_of_a_user_is_not_collected():
    findings = Findings()
    with pytest.raises(KeyError), findings.collect_errors():
        raise KeyError("a defect")
    assert not findings.found
