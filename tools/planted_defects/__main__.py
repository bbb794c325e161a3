"""Says which tests notice each planted defect: `python -m tools.planted_defects [ID ...]`; exit code 1 below 95%.

Each of tests/planted_defects/*.toml is planted in a copy of the checkout, beside which nothing is changed. A run with
`--results` goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tools.planted_defects.defects import Defect, read_defects
from tools.planted_defects.judging import Judge, Verdict, append_verdict, import_heavy, read_verdicts

ROOT = Path(__file__).resolve().parents[2]
LEAST_SHARE = 0.95


def main() -> int:
    words = parse_words()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that the copy goes, and what runs in it
    every = read_defects(ROOT / "tests")
    if problems := [problem for defect in every if (problem := defect.find_problem(ROOT))]:
        print("\n".join(problems))
        return 1
    chosen = [one for one in every if (not words.ids or one.id in words.ids) and words.room in ("", one.room)]
    if unknown := set(words.ids) - {one.id for one in every}:
        print(f"no defect is called {', '.join(sorted(unknown))}")
        return 1
    known = read_verdicts(words.results, chosen) if words.results else {}
    known = {name: verdict for name, verdict in known.items() if verdict.noticed_by is not None}
    verdicts = judge_all(chosen, {} if words.ids else known, words.results, words.budget)
    print(json.dumps([asdict(each) for each in verdicts], indent=1) if words.json else render_table(chosen, verdicts))
    return int(sum(each.noticed_by is not None for each in verdicts) < LEAST_SHARE * len(verdicts))


def parse_words() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plant defects in a copy of the checkout, and say who notices.")
    parser.add_argument("ids", nargs="*", help="names of defects, judged again; without any, all")
    parser.add_argument("--room", default="", help="only those of a room")
    parser.add_argument(
        "--results", type=Path, help="a file of verdicts, appended to; what it says was noticed is not judged again"
    )
    parser.add_argument("--budget", type=float, default=200.0, help="seconds of processor time for a defect")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def judge_all(
    defects: Sequence[Defect], known: dict[str, Verdict], results: Path | None, budget_s: float
) -> list[Verdict]:
    """Return the verdicts in the order of the defects; what is not known is found out in a copy."""
    found = dict(known)
    if all(defect.id in known for defect in defects):
        return [found[defect.id] for defect in defects]
    results = results.absolute() if results else None
    with tempfile.TemporaryDirectory(prefix="defects-") as folder:
        judge = Judge(enter_copy(Path(folder) / "checkout"), Path(folder), budget_s)
        import_heavy()
        left = [defect for defect in defects if defect.id not in known]
        while left:
            for defect in left:
                found[defect.id] = judge.judge(defect)
                print(render_line(found[defect.id]), file=sys.stderr, flush=True)
                if results:
                    append_verdict(results, found[defect.id])
            doubtful = judge.doubt(found.values())
            left = [defect for defect in defects if defect.id in doubtful]
        os.chdir(ROOT)
    return [found[defect.id] for defect in defects]


def enter_copy(copy: Path) -> Path:
    """Copy what git knows or would add, and make the copy what this process and its children import from."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    return copy


def render_table(defects: Sequence[Defect], verdicts: Sequence[Verdict]) -> str:
    noticed = sum(each.noticed_by is not None for each in verdicts)
    lines = [f"{defect.room:13} {render_line(verdict)}" for defect, verdict in zip(defects, verdicts, strict=True)]
    total = sum(each.seconds for each in verdicts)
    return "\n".join([*lines, f"{noticed} of {len(verdicts)} noticed, in {total:.0f} s of processor time"])


def render_line(verdict: Verdict) -> str:
    survived = "SURVIVED" if verdict.judged else f"NOT JUDGED, up to {verdict.stage}"
    return f"{verdict.id:45} {verdict.seconds:6.1f} s  {verdict.noticed_by or survived}"


if __name__ == "__main__":
    sys.exit(main())
