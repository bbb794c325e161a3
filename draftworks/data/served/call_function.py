"""Calls a redaction function, `python -m draftworks.data.served.call_function MODULE:FUNCTION`: rows on stdin, rows on stdout.

What the function prints goes to stderr, which nobody stores: it may quote rows.
"""

from __future__ import annotations

import importlib
import json
import os
import sys


def main() -> None:
    """Read JSONL rows from stdin, call the function with the list of them, and write its result as JSONL."""
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    module, _, name = sys.argv[1].partition(":")
    redact = getattr(importlib.import_module(module), name)
    for row in redact([json.loads(line) for line in sys.stdin.buffer]):
        results.write(json.dumps(row) + "\n")
    results.close()


if __name__ == "__main__":
    main()
