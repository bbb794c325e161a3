"""A pid means something only in its own process table."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from draftworks.storage.process_place import ProcessPlace, is_process_dead, read_start


def test_the_calling_process_lives_here_and_nobody_knows_elsewhere():
    own = ProcessPlace.own()
    assert own.pid == os.getpid()
    assert own.is_dead() is False
    assert replace(own, started=own.started + 1).is_dead() is True
    assert own.is_dead(replace(own.place, host="elsewhere")) is None
    assert own.is_dead(replace(own.place, boot="another", machine="")) is None


def test_a_process_that_ended_is_dead():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = read_start(process.pid)
    assert not is_process_dead(process.pid, started)
    process.communicate()
    assert is_process_dead(process.pid, started)
    with pytest.raises(ProcessLookupError):
        read_start(process.pid)
