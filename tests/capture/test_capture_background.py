"""Background work returns its result or raises its error, and does not block the exit of the program."""

from __future__ import annotations

import subprocess
import sys

import pytest

from draftworks.capture.background import run_in_background

GENEROUS_S = 60


def test_its_result_and_its_error_come_back():
    assert run_in_background(divmod, 7, 2).result(GENEROUS_S) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        run_in_background(divmod, 7, 0).result(GENEROUS_S)


def test_a_program_ends_while_it_still_waits():
    waits = "import threading\nfrom draftworks.capture.background import run_in_background\n"
    waits += (
        "begun = threading.Event()\nrun_in_background(lambda: (begun.set(), threading.Event().wait()))\nbegun.wait()"
    )
    assert subprocess.run([sys.executable, "-c", waits], timeout=GENEROUS_S, check=False).returncode == 0
