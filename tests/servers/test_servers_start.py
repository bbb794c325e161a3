"""Spawned processes end with their parent, also while they still start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
from processes import lives, wait_until_ended

from draftworks.servers import start

OWNER = """
import sys, time
from pathlib import Path
from multiprocessing import get_context
from draftworks.servers.start import tie_children_to_parent

if __name__ == "__main__":
    with tie_children_to_parent(Path(sys.argv[1])):
        child = get_context("spawn").Process(target=time.sleep, args=(600,))
        child.start()
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_what_it_spawns_dies_with_us_from_its_first_moment_on(tmp_path: Path):
    (tmp_path / "owner.py").write_text(OWNER)
    command = [sys.executable, str(tmp_path / "owner.py"), str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = psutil.Process(int(owner.stdout.readline()))
    assert lives(child)
    owner.kill()
    owner.wait()
    wait_until_ended(child)


PROGRAM = """
import sys
from multiprocessing import get_context

def say(word):
    print("child", word, flush=True)

if __name__ == "__main__":
    print(sys.argv[1:], flush=True)
    child = get_context("spawn").Process(target=say, args=(sys.argv[1],))
    child.start()
    child.join()
"""


def test_a_program_run_with_tied_children_gets_its_arguments_and_its_children_find_it(tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, *start.build_command(tmp_path, "program"), "one", "--two"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines() == ["['one', '--two']", "child one"]
