"""llama.cpp's own converter on a target and on exports of its drafts: `python gguf_judge.py SOURCES OUT TARGET KIND=EXPORT …`.

KIND is an `--outtype`. A file `EXPORT-KIND.gguf` is written into OUT for each, and for the target `f32`, as `target.gguf`.
KIND `mtp` is the layer of the target `EXPORT` alone, in f32: `mtp.gguf`.
A way of cutting text that the converter does not know (the embedded target's) is taken for gpt-2's, which it is.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    sources, out, target, *asked = sys.argv[1:]
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    from conversion import base

    known = base.TextModel.get_vocab_base_pre

    def name_cut(model, tokenizer):
        try:
            return known(model, tokenizer)
        except NotImplementedError:
            return "gpt-2"

    base.TextModel.get_vocab_base_pre = name_cut
    spec = importlib.util.spec_from_file_location("convert_hf_to_gguf", f"{sources}/convert_hf_to_gguf.py")
    converter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(converter)
    for kind, folder in [("f32", target), *(each.split("=", 1) for each in asked)]:
        if kind == "mtp":
            name, more = "mtp", ["--mtp"]
        elif folder == target:
            name, more = "target", []
        else:
            name, more = f"{Path(folder).name}-{kind}", ["--target-model-dir", target]
        kind = "f32" if kind == "mtp" else kind
        sys.argv = ["convert", folder, "--outtype", kind, "--outfile", str(Path(out) / f"{name}.gguf"), *more]
        converter.main()


if __name__ == "__main__":
    main()
