"""Lint: what would go wrong with a model repository, named before a server finds out.

    python -m build.lint model_repository
    python -m build.lint model_repository --model-config-name llama-3.1-8b-fp8-hopper

Reads config.pbtxt files (and ``configs/*.pbtxt``: without --model-config-name every variant is checked in turn); needs
neither a server nor a GPU. Exit status 1 when there is an error, 2 when there is nothing to read.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from build.lint.engine import engine_faults
from build.lint.ensemble import ensemble_faults
from build.lint.repository import ERROR, WARNING, Fault, Model, Repository, config_names, read


def lint(repository: Repository) -> list[Fault]:
    """Every fault of a repository, in the order of its models."""
    faults = list(repository.faults)
    for model in repository.models.values():
        faults += [*_tensor_names(model), *_queues(model)]
        if model.is_ensemble:
            faults += ensemble_faults(repository, model)
        elif model.is_engine:
            faults += engine_faults(model)
    return list(dict.fromkeys(faults))


def _tensor_names(model: Model) -> Iterator[Fault]:
    for side in ("input", "output"):
        counts = Counter(tensor.name for tensor in getattr(model.config, side))
        for name in (name for name, count in counts.items() if count > 1):
            yield model.error("duplicate", f"{side} {name!r} is listed {counts[name]} times")


def _queues(model: Model) -> Iterator[Fault]:
    """Triton's own queues: unbounded unless the configuration says otherwise."""
    if not model.batches:
        return
    batching = model.config.dynamic_batching
    if not batching.default_queue_policy.max_queue_size and not batching.priority_levels:
        unbounded = "dynamic_batching without default_queue_policy.max_queue_size"
        yield model.error("queue", f"{unbounded}: its queue grows without bound")
    for level in range(1, batching.priority_levels + 1):
        policy = batching.priority_queue_policy.get(level, batching.default_queue_policy)
        if not policy.max_queue_size:
            yield model.error("queue", f"priority level {level} has no max_queue_size: its queue is unbounded")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("repository", type=Path)
    parser.add_argument("--model-config-name", help="as for tritonserver; without it every variant is checked")
    options = parser.parse_args(arguments)
    if not options.repository.is_dir():
        print(f"error: repository: must be a folder, got {options.repository}", file=sys.stderr)
        return 2
    named = options.model_config_name
    rows: dict[Fault, str] = {}
    for name in [named] if named is not None else config_names(options.repository):
        repository = read(options.repository, name)
        if not repository.models and not repository.faults:
            print(f"error: repository: must hold models, got none in {options.repository}", file=sys.stderr)
            return 2
        for fault in lint(repository):
            rows.setdefault(fault, name)
    for fault, name in rows.items():
        variant = f" ({name})" if name else ""
        print(f"{fault.severity}: {fault.model}{variant}: {fault.rule}: {fault.message}")
    errors, warnings = (sum(fault.severity == severity for fault in rows) for severity in (ERROR, WARNING))
    print(f"{options.repository}: {errors} errors, {warnings} warnings")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
