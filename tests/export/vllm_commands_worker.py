"""What a vLLM's own configuration makes of printed commands: `python vllm_commands_worker.py FILE...`, one JSON object.

It runs in vLLM's environment, with another release's package before the installed one on PYTHONPATH.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from vllm import EngineArgs


def describe(command: str) -> str:
    """Return the draft's class, or why the command is refused."""
    words = shlex.split(command)
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64}
    try:
        made = EngineArgs(model=words[2], speculative_config=speculative, **options).create_engine_config()
    except ValueError as error:
        return f"refused: {error}"
    return made.speculative_config.draft_model_config.architectures[0]


if __name__ == "__main__":
    found = {Path(name).stem: describe(Path(name).read_text()) for name in sys.argv[1:]}
    print(json.dumps(found), flush=True)
