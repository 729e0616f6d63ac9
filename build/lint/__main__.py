"""Lint: what would go wrong with a model repository, named before a server finds out.

    python -m build.lint model_repository
    python -m build.lint model_repository --model-config-name llama-3.1-8b-fp8-hopper --json

Reads config.pbtxt files (and ``configs/*.pbtxt``: without --model-config-name every variant is checked in turn) and the
sources beside them; needs neither a server nor a GPU. Exit status 1 when there is an error, 2 when there is nothing to
read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from build.lint.engine import engine_faults, is_engine, is_tensorrtllm
from build.lint.ensemble import ensemble_faults
from build.lint.python_model import python_faults
from build.lint.repository import ERROR, WARNING, Fault, Model, Repository, config_names, read


def lint(repository: Repository) -> list[Fault]:
    """Every fault of a repository, in the order of its models."""
    faults = list(repository.faults)
    for model in repository.parsed:
        faults += _tensor_names(model)
        faults += _queues(model)
        faults += _scripting(model)
        faults += python_faults(model)
        if model.is_ensemble:
            faults += ensemble_faults(repository, model)
        elif is_engine(model):
            faults += engine_faults(model)
        elif is_tensorrtllm(model):
            message = "it has no input_ids, request_output_len and output_ids, so it cannot be an engine's step"
            faults.append(Fault(model.name, "contract", ERROR, message))
    return list(dict.fromkeys(faults))


def _tensor_names(model: Model) -> Iterator[Fault]:
    for side in ("input", "output"):
        counts = Counter(tensor.name for tensor in getattr(model.config, side))
        for name in (name for name, count in counts.items() if count > 1):
            yield Fault(model.name, "duplicate", ERROR, f"{side} {name!r} is listed {counts[name]} times")


def _queues(model: Model) -> Iterator[Fault]:
    """Triton's own queues: unbounded unless the configuration says otherwise."""
    if not model.config.HasField("dynamic_batching"):
        return
    batching = model.config.dynamic_batching
    if not batching.default_queue_policy.max_queue_size and not batching.priority_levels:
        message = "dynamic_batching without default_queue_policy.max_queue_size: its queue grows without bound"
        yield Fault(model.name, "queue", ERROR, message)
    for level in range(1, batching.priority_levels + 1):
        policy = batching.priority_queue_policy.get(level, batching.default_queue_policy)
        if not policy.max_queue_size:
            yield Fault(
                model.name, "queue", ERROR, f"priority level {level} has no max_queue_size: its queue is unbounded"
            )


def _scripting(model: Model) -> Iterator[Fault]:
    """The sample's BLS model, which drives the others from Python in the ensemble's place."""
    if "tensorrt_llm_model_name" in model.config.parameters:
        message = "a BLS model holds one Python process per running request, and a client that goes away is not noticed"
        yield Fault(model.name, "bls", WARNING, message)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repository", type=Path)
    parser.add_argument("--model-config-name", help="as for tritonserver; without it every variant is checked")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if not options.repository.is_dir():
        print(f"error: {options.repository} is not a folder", file=sys.stderr)
        return 2
    named = options.model_config_name
    rows: dict[Fault, str] = {}
    for name in [named] if named is not None else config_names(options.repository):
        repository = read(options.repository, name)
        if not repository.models and not repository.faults:
            print(f"error: {options.repository} holds no models", file=sys.stderr)
            return 2
        for fault in lint(repository):
            rows.setdefault(fault, name)
    if options.json:
        print(json.dumps([asdict(fault) | {"model_config_name": name} for fault, name in rows.items()], indent=2))
    else:
        for fault, name in rows.items():
            variant = f" ({name})" if name else ""
            print(f"{fault.severity}: {fault.model}{variant}: {fault.rule}: {fault.message}")
        errors, warnings = (sum(f.severity == s for f in rows) for s in (ERROR, WARNING))
        print(f"{options.repository}: {errors} errors, {warnings} warnings")
    return 1 if any(fault.severity == ERROR for fault in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
