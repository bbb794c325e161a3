"""Write the questions of the embedded corpus into a file, at once the first and then a few each second, as a log grows."""

import json
import sys
import time
from pathlib import Path

FIRST, EACH_SECOND, ALL = 400, 25, 1600
CORPUS = Path(__file__).parents[2] / "models" / "tiny" / "corpus.parquet"


def grow(path: Path) -> None:
    """Write the file unless it is there already."""
    import pyarrow.parquet as pq

    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as log:
        for number, row in enumerate(pq.read_table(CORPUS).to_pylist()[:ALL], start=1):
            log.write(json.dumps({"messages": row["messages"][:2], "task": row["task"]}) + "\n")
            if number >= FIRST and number % EACH_SECOND == 0:
                log.flush()
                time.sleep(1)


grow(Path(sys.argv[1]))
