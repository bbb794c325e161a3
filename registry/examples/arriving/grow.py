"""Write the questions of the embedded corpus into a file, at once the first and then a few each second, as a log grows."""

import json
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq

FIRST, EACH_SECOND, ALL = 400, 25, 1600
corpus = Path(__file__).parents[2] / "models" / "tiny" / "corpus.parquet"
rows = [{"messages": row["messages"][:2], "task": row["task"]} for row in pq.read_table(corpus).to_pylist()[:ALL]]
path = Path(sys.argv[1])
path.parent.mkdir(parents=True, exist_ok=True)
if not path.exists():
    with path.open("w") as log:
        for number, row in enumerate(rows, start=1):
            log.write(json.dumps(row) + "\n")
            if number >= FIRST and number % EACH_SECOND == 0:
                log.flush()
                time.sleep(1)
