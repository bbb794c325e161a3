"""A program of the engine, `PROGRAM`, for which some samples never have valid features: run as a script."""

from __future__ import annotations

import os
import runpy
import zlib

from draftworks.capture import verify
from draftworks.errors import CaptureError

_verify = verify.verify_capture


def verify(config, sample_id, *more) -> None:
    if zlib.crc32(sample_id.encode()) % 16 == 3:
        raise CaptureError(f"sample {sample_id}: its features are not valid")
    _verify(config, sample_id, *more)


if __name__ == "__main__":
    verify.verify_capture = verify
    runpy.run_module(os.environ["PROGRAM"], run_name="__main__", alter_sys=True)
