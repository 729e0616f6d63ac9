"""What can be wrong with an ensemble's graph: wiring, types and shapes, decoupling, order, queues.

Sources: Triton core's own checks at load, and what was measured on Triton 2.51 (docs/decisions/0004).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from build.lint.engine import is_engine
from build.lint.repository import ERROR, NOTE, WARNING, Fault, Model, Repository, type_name
from contract import tensors

INFLIGHT_LIMIT = "max_inflight_requests"


@dataclass(frozen=True)
class Edge:
    """One tensor of the ensemble as one end of it sees it."""

    tensor: str
    model: str
    name: str
    datatype: int
    shape: tuple[int, ...]
    optional: bool = False


def ensemble_faults(repository: Repository, ensemble: Model) -> Iterator[Fault]:
    """Every fault of one ensemble."""
    yield from _wiring(repository, ensemble)
    yield from _agreement(repository, ensemble)
    yield from _decoupling(repository, ensemble)
    yield from _order_and_queues(repository, ensemble)
    yield from _signature(ensemble)


def steps(repository: Repository, ensemble: Model) -> list[tuple[Model, dict[str, str], dict[str, str]]]:
    """(model, its inputs to tensors, its outputs to tensors) of every step whose model is readable."""
    found = []
    for step in ensemble.config.ensemble_scheduling.step:
        model = repository.models.get(step.model_name)
        if model is not None and model.config is not None:
            found.append((model, dict(step.input_map), dict(step.output_map)))
    return found


def downstream(repository: Repository, ensemble: Model) -> list[Model]:
    """Models that get a tensor which came out of a decoupled step, in step order."""
    reached: set[str] = set()
    found: dict[str, Model] = {}
    rows = steps(repository, ensemble)
    for _ in rows:  # steps may be written in any order: as many rounds as steps reach everything
        for model, inputs, outputs in rows:
            after = any(tensor in reached for tensor in inputs.values())
            if after:
                found.setdefault(model.name, model)
            if after or model.decoupled:
                reached |= set(outputs.values())
    return list(found.values())


def _wiring(repository: Repository, ensemble: Model) -> Iterator[Fault]:
    produced = {tensor.name: ensemble.name for tensor in ensemble.config.input}
    consumed: set[str] = set()
    if not ensemble.config.ensemble_scheduling.step:
        yield Fault(ensemble.name, "graph", ERROR, "the ensemble has no steps")
    for step in ensemble.config.ensemble_scheduling.step:
        model = repository.models.get(step.model_name)
        if model is None:
            yield Fault(ensemble.name, "graph", ERROR, f"step {step.model_name!r} is not a model of this repository")
        elif model.config is not None:
            yield from _map_faults(ensemble, model, dict(step.input_map), dict(step.output_map))
        consumed |= set(step.input_map.values())
        for tensor in step.output_map.values():
            if tensor in produced:
                message = f"tensor {tensor!r} comes from both {produced[tensor]} and {step.model_name}"
                yield Fault(ensemble.name, "graph", ERROR, message)
            produced[tensor] = step.model_name
    for tensor in sorted(consumed - produced.keys()):
        yield Fault(ensemble.name, "graph", ERROR, f"tensor {tensor!r} is used by a step and produced by none")
    for output in ensemble.config.output:
        if output.name not in produced:
            yield Fault(ensemble.name, "graph", ERROR, f"output {output.name!r} is produced by no step")
    for tensor in ensemble.config.input:
        if tensor.name not in consumed:
            yield Fault(
                ensemble.name, "graph", ERROR, f"input {tensor.name!r} feeds no step, so Triton refuses to load it"
            )
    if cycle := _cycle(ensemble):
        yield Fault(ensemble.name, "graph", ERROR, f"the steps wait for each other: {' -> '.join(cycle)}")


def _map_faults(ensemble: Model, model: Model, inputs: dict[str, str], outputs: dict[str, str]) -> Iterator[Fault]:
    known_inputs = {tensor.name: tensor for tensor in model.config.input}
    known_outputs = {tensor.name for tensor in model.config.output}
    for key in sorted(inputs.keys() - known_inputs.keys()):
        yield Fault(ensemble.name, "graph", ERROR, f"step {model.name} has no input {key!r}")
    for key in sorted(outputs.keys() - known_outputs):
        yield Fault(ensemble.name, "graph", ERROR, f"step {model.name} has no output {key!r}")
    for name, tensor in known_inputs.items():
        if name not in inputs and not tensor.optional:
            yield Fault(
                ensemble.name, "graph", ERROR, f"required input {name!r} of step {model.name} is fed by nothing"
            )


def _cycle(ensemble: Model) -> list[str]:
    """Models of a circle of steps, or nothing."""
    rows = [
        (s.model_name, set(s.input_map.values()), set(s.output_map.values()))
        for s in ensemble.config.ensemble_scheduling.step
    ]
    made = {tensor for _, _, outputs in rows for tensor in outputs}
    ready: set[str] = set()
    waiting = rows
    while waiting:
        able = [row for row in waiting if not (row[1] & made) - ready]
        if not able:
            return [name for name, _, _ in waiting]
        ready |= {tensor for _, _, outputs in able for tensor in outputs}
        waiting = [row for row in waiting if row not in able]
    return []


def _shape(model: Model, dims: list[int]) -> tuple[int, ...]:
    """Dims with the batch dimension Triton puts in front where the model batches."""
    return ((-1,) if model.config.max_batch_size > 0 else ()) + tuple(dims)


def _agreement(repository: Repository, ensemble: Model) -> Iterator[Fault]:
    sources = {
        t.name: Edge(t.name, ensemble.name, t.name, t.data_type, _shape(ensemble, t.dims), t.optional)
        for t in ensemble.config.input
    }
    uses: list[Edge] = []
    for model, inputs, outputs in steps(repository, ensemble):
        if ensemble.config.max_batch_size > model.config.max_batch_size:
            batch = f"max_batch_size {ensemble.config.max_batch_size} is more than step {model.name}'s"
            yield Fault(ensemble.name, "shape", ERROR, f"{batch} {model.config.max_batch_size}")
        for tensor in model.config.output:
            if tensor.name in outputs:
                at = outputs[tensor.name]
                sources.setdefault(at, Edge(at, model.name, tensor.name, tensor.data_type, _shape(model, tensor.dims)))
        for tensor in model.config.input:
            if tensor.name in inputs:
                shape = _shape(model, tensor.dims)
                uses.append(
                    Edge(inputs[tensor.name], model.name, tensor.name, tensor.data_type, shape, tensor.optional)
                )
    for tensor in ensemble.config.output:
        uses.append(Edge(tensor.name, ensemble.name, tensor.name, tensor.data_type, _shape(ensemble, tensor.dims)))
    for use in uses:
        if (source := sources.get(use.tensor)) is not None and source is not use:
            yield from _edge_faults(ensemble, source, use)


def _edge_faults(ensemble: Model, source: Edge, use: Edge) -> Iterator[Fault]:
    ends = f"{source.model}.{source.name} -> {use.model}.{use.name}"
    if source.datatype != use.datatype:
        types = f"{type_name(source.datatype)} -> {type_name(use.datatype)}"
        yield Fault(ensemble.name, "dtype", ERROR, f"{ends}: {types}")
    same = len(source.shape) == len(use.shape) and all(
        -1 in (a, b) or a == b for a, b in zip(source.shape, use.shape, strict=False)
    )
    if not same:
        yield Fault(ensemble.name, "shape", ERROR, f"{ends}: {list(source.shape)} -> {list(use.shape)}")
    if source.model == ensemble.name and source.optional and not use.optional and use.model != ensemble.name:
        message = f"optional input {source.name!r} feeds {use.model}.{use.name}, which is required: a request may fail"
        yield Fault(ensemble.name, "optional", ERROR, message)


def _decoupling(repository: Repository, ensemble: Model) -> Iterator[Fault]:
    if ensemble.config.HasField("model_transaction_policy"):
        message = "Triton derives an ensemble's decoupled from its steps; do not write model_transaction_policy"
        yield Fault(ensemble.name, "decoupled", WARNING, message)
    rows = steps(repository, ensemble)
    decoupled = [model.name for model, _, _ in rows if model.decoupled]
    names = {tensor.name for tensor in ensemble.config.input}
    if not decoupled and names & {"stream", "streaming"}:
        message = "it takes 'stream', but no step is decoupled, so nothing can be streamed"
        yield Fault(ensemble.name, "decoupled", ERROR, message)
    if decoupled and ensemble.config.response_cache.enable:
        yield Fault(
            ensemble.name, "decoupled", ERROR, "a response cache on a decoupled ensemble: Triton refuses to load it"
        )
    # The label rule of Triton core: a step may not mix tensors that come from a decoupled model with others.
    labels = dict.fromkeys(names, "")
    for _ in rows:
        for model, inputs, outputs in rows:
            origins = {labels[tensor] for tensor in inputs.values() if tensor in labels}
            label = model.name if model.decoupled else (min(origins) if origins else "")
            for tensor in outputs.values():
                labels[tensor] = label
    for model, inputs, _ in rows:
        origins = {labels[tensor]: tensor for tensor in inputs.values() if tensor in labels}
        if len(origins) > 1:
            message = ", ".join(
                f"{tensor!r} from {label or 'no decoupled model'}" for label, tensor in sorted(origins.items())
            )
            message = (
                f"step {model.name} mixes inputs of different decoupled origin ({message}): Triton refuses to load it"
            )
            yield Fault(ensemble.name, "decoupled", ERROR, message)


def _order_and_queues(repository: Repository, ensemble: Model) -> Iterator[Fault]:
    rows = steps(repository, ensemble)
    after = downstream(repository, ensemble)
    for model, _, _ in rows:
        if model not in after and not model.config.HasField("dynamic_batching") and not is_engine(model):
            message = f"step {model.name} has no dynamic_batching, so its queue cannot be bounded"
            yield Fault(ensemble.name, "queue", WARNING, message)
    for model in after:
        yield from _ordered(ensemble, model)
        if model.config.HasField("dynamic_batching"):
            message = (
                f"dynamic batching on {model.name}, after a decoupled step: on Triton 2.51 a cancelled request leaks"
            )
            yield Fault(ensemble.name, "order", WARNING, message)
        if model.config.response_cache.enable:
            message = f"a response cache on {model.name} would answer for one stream with another's state"
            yield Fault(ensemble.name, "order", ERROR, message)
        if "batch_decode" in model.sources and not any(w in model.sources for w in ("request_id(", "correlation_id(")):
            message = (
                f"{model.name} decodes every response alone (batch_decode): streams lose spaces and break characters"
            )
            yield Fault(ensemble.name, "stateless", WARNING, message)
    engines = [model for model, _, _ in rows if model.config.backend == "tensorrtllm" or model.name == "tensorrt_llm"]
    limited = any(field.name == INFLIGHT_LIMIT for field, _ in ensemble.config.ensemble_scheduling.ListFields())
    if engines and after and not limited:
        message = (
            f"without {INFLIGHT_LIMIT} responses pile up without bound when {engines[0].name} outruns {after[0].name}"
        )
        yield Fault(ensemble.name, "queue", WARNING, message)
    levels = {model.name: model.config.dynamic_batching.priority_levels for model, _, _ in rows}
    if any(levels.values()) and not all(levels.values()):
        lost = ", ".join(name for name, level in levels.items() if not level)
        yield Fault(
            ensemble.name,
            "priority",
            WARNING,
            f"a request's priority is reset to 0 at {lost}: no priority_levels there",
        )
    for model in engines:
        fed = next(inputs for m, inputs, _ in rows if m is model)
        if "stop" in {tensor.name for tensor in model.config.input} and "stop" not in fed:
            message = (
                f"a client that goes away does not stop {model.name}: send it a request of the same id with stop = true"
            )
            yield Fault(ensemble.name, "cancel", NOTE, message)


def _ordered(ensemble: Model, model: Model) -> Iterator[Fault]:
    """Responses keep their order through one instance without batching, and through what Triton orders itself."""
    batching = model.config.dynamic_batching if model.config.HasField("dynamic_batching") else None
    sequences = model.config.HasField("sequence_batching")
    if batching is not None and batching.preserve_ordering or sequences:
        return
    if batching is not None:
        message = (
            f"{model.name} follows a decoupled step: its dynamic_batching reorders chunks unless preserve_ordering"
        )
        yield Fault(ensemble.name, "order", ERROR, message)
    elif model.instances is None:
        message = (
            f"{model.name} follows a decoupled step; say instance_group KIND_CPU count 1, or each GPU gets an instance"
        )
        yield Fault(ensemble.name, "order", ERROR, message)
    elif model.instances > 1:
        message = f"{model.name} follows a decoupled step with {model.instances} instances: chunks are reordered"
        yield Fault(ensemble.name, "order", ERROR, message)


def _signature(ensemble: Model) -> Iterator[Fault]:
    """The public model: our names with our types, and what a text client cannot do without."""
    for side, expected in (("input", tensors.ENSEMBLE_INPUTS), ("output", tensors.ENSEMBLE_OUTPUTS)):
        known = {tensor.name: tensor for tensor in expected}
        for tensor in getattr(ensemble.config, side):
            ours = known.get(tensor.name)
            if ours is None:
                continue
            datatype = "TYPE_STRING" if ours.datatype == "BYTES" else f"TYPE_{ours.datatype}"
            there = type_name(tensor.data_type)
            if datatype != there or tuple(tensor.dims) != ours.dims:
                found, allowed = f"{there} {list(tensor.dims)}", f"{datatype} {list(ours.dims)}"
                message = f"{side} {tensor.name!r} is {found}; the contract says {allowed}"
                yield Fault(ensemble.name, "contract", ERROR, message)
    if "text_input" in {tensor.name for tensor in ensemble.config.input}:
        if "text_output" not in {tensor.name for tensor in ensemble.config.output}:
            yield Fault(ensemble.name, "contract", ERROR, "it takes text_input and has no output text_output")
