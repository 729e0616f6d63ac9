"""The argument parser of a TensorRT-LLM program, rebuilt from its option table, and nothing of ours in between."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

TABLES = Path(__file__).resolve().parents[2] / "build" / "trtllm"
TYPES = {"str": str, "int": int, "float": float}
TABLE_OF = {
    "trtllm-build": "trtllm_build",
    "/app/examples/quantization/quantize.py": "quantize",
    "/app/examples/models/core/llama/convert_checkpoint.py": "convert_checkpoint_llama",
    "/app/examples/models/core/qwen/convert_checkpoint.py": "convert_checkpoint_qwen",
}


class StrictParser(argparse.ArgumentParser):
    """Raises ValueError where argparse would end the program."""

    def error(self, message: str):
        raise ValueError(f"{self.prog}: {message}")


def parser(name: str) -> StrictParser:
    """The parser of ``<name>_options.json``; abbreviations are refused, so a typo cannot pass for one."""
    described = json.loads((TABLES / f"{name}_options.json").read_text(encoding="utf-8"))
    built = StrictParser(prog=described["program"], allow_abbrev=False)
    for option in described["options"]:
        settings: dict = {"dest": option["dest"]}
        if option.get("action") == "store_true":
            settings["action"] = "store_true"
        elif option["type"] == "enum":
            settings |= {"type": str.lower, "choices": option["values"]}
        else:
            settings["type"] = TYPES[option["type"]]
            if option.get("choices_complete", True) and "choices" in option:
                settings["choices"] = [choice for choice in option["choices"] if choice is not None]
            settings |= {key: option[key] for key in ("nargs", "const", "required") if key in option}
        settings["default"] = argparse.SUPPRESS if option["default"] == "SUPPRESS" else option["default"]
        built.add_argument(*option["flags"], **settings)
    return built


def parse(argv: list[str]) -> argparse.Namespace:
    """What the program named by a command line makes of the rest of it."""
    words = argv[1:] if argv[0] == "python3" else argv
    return parser(TABLE_OF[words[0]]).parse_args(words[1:])
