"""What can be wrong with an ensemble's graph: wiring, types and shapes, decoupling, order, queues.

Sources: Triton core's own checks at load, and what was measured on Triton 2.51 (docs/decisions/0004).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from build.lint.engine import contract_faults
from build.lint.repository import Fault, Model, Repository, type_name
from contract import packed_delta, tensors

INFLIGHT_LIMIT = "max_inflight_requests"


@dataclass(frozen=True)
class Step:
    """One step: ``inputs`` and ``outputs`` map the model's tensors to the ensemble's."""

    model: Model
    inputs: dict[str, str]
    outputs: dict[str, str]


@dataclass(frozen=True)
class Edge:
    """One tensor of the ensemble as one end of it sees it."""

    model: str
    name: str
    datatype: int
    shape: tuple[int, ...]
    optional: bool = False


def ensemble_faults(repository: Repository, ensemble: Model) -> Iterator[Fault]:
    """Every fault of one ensemble."""
    scheduled = ensemble.config.ensemble_scheduling.step
    for name in (step.model_name for step in scheduled if step.model_name not in repository.models):
        yield ensemble.error("graph", f"step {name!r} is not a model of this repository")
    if not scheduled:
        yield ensemble.error("graph", "the ensemble has no steps")
    there = [step for step in scheduled if step.model_name in repository.models]
    steps = [Step(repository.models[s.model_name], dict(s.input_map), dict(s.output_map)) for s in there]
    yield from _wiring(ensemble, steps, len(steps) == len(scheduled))
    yield from _agreement(ensemble, steps)
    yield from _decoupling(ensemble, steps)
    yield from _order_and_queues(ensemble, steps)
    yield from _signature(ensemble)


def _wiring(ensemble: Model, steps: list[Step], complete: bool) -> Iterator[Fault]:
    produced = {tensor.name: ensemble.name for tensor in ensemble.config.input}
    consumed = {tensor for step in steps for tensor in step.inputs.values()}
    for step in steps:
        yield from _map_faults(ensemble, step)
        for tensor in step.outputs.values():
            if tensor in produced:
                both = f"both {produced[tensor]} and {step.model.name}"
                yield ensemble.error("graph", f"tensor {tensor!r} comes from {both}")
            produced[tensor] = step.model.name
    if not complete:
        return
    for tensor in sorted(consumed - produced.keys()):
        yield ensemble.error("graph", f"tensor {tensor!r} is used by a step and produced by none")
    for output in (output.name for output in ensemble.config.output if output.name not in produced):
        yield ensemble.error("graph", f"output {output!r} is produced by no step")
    for name in (tensor.name for tensor in ensemble.config.input if tensor.name not in consumed):
        yield ensemble.error("graph", f"input {name!r} feeds no step, so Triton refuses to load it")
    if cycle := _cycle(steps):
        yield ensemble.error("graph", f"the steps wait for each other: {' -> '.join(cycle)}")


def _map_faults(ensemble: Model, step: Step) -> Iterator[Fault]:
    name, config = step.model.name, step.model.config
    for key in sorted(step.inputs.keys() - {tensor.name for tensor in config.input}):
        yield ensemble.error("graph", f"step {name} has no input {key!r}")
    for key in sorted(step.outputs.keys() - {tensor.name for tensor in config.output}):
        yield ensemble.error("graph", f"step {name} has no output {key!r}")
    for tensor in config.input:
        if tensor.name not in step.inputs and not tensor.optional:
            yield ensemble.error("graph", f"required input {tensor.name!r} of step {name} is fed by nothing")


def _cycle(steps: list[Step]) -> list[str]:
    """Models of a circle of steps, or nothing."""
    waiting, missing = steps, {tensor for step in steps for tensor in step.outputs.values()}
    while waiting:
        able = [step for step in waiting if not missing & set(step.inputs.values())]
        if not able:
            return [step.model.name for step in waiting]
        missing -= {tensor for step in able for tensor in step.outputs.values()}
        waiting = [step for step in waiting if step not in able]
    return []


def _agreement(ensemble: Model, steps: list[Step]) -> Iterator[Fault]:
    """Both ends of every tensor have the same type, a shape that fits, and the same need of it."""
    sources = {tensor.name: _edge(ensemble, tensor, tensor.optional) for tensor in ensemble.config.input}
    uses = [(tensor.name, _edge(ensemble, tensor)) for tensor in ensemble.config.output]
    for step in steps:
        batch, limit = ensemble.config.max_batch_size, step.model.config.max_batch_size
        if batch > limit:
            yield ensemble.error("shape", f"max_batch_size {batch} is more than step {step.model.name}'s {limit}")
        for output in step.model.config.output:
            if output.name in step.outputs:
                sources.setdefault(step.outputs[output.name], _edge(step.model, output))
        for tensor in step.model.config.input:
            if tensor.name in step.inputs:
                uses.append((step.inputs[tensor.name], _edge(step.model, tensor, tensor.optional)))
    for tensor_name, use in uses:
        if tensor_name in sources:
            yield from _edge_faults(ensemble, sources[tensor_name], use)


def _edge(model: Model, tensor, optional: bool = False) -> Edge:
    """One end; where the model batches, Triton puts the batch dimension in front."""
    shape = ((-1,) if model.config.max_batch_size > 0 else ()) + tuple(tensor.dims)
    return Edge(model.name, tensor.name, tensor.data_type, shape, optional)


def _edge_faults(ensemble: Model, source: Edge, use: Edge) -> Iterator[Fault]:
    ends = f"{source.model}.{source.name} -> {use.model}.{use.name}"
    if source.datatype != use.datatype:
        yield ensemble.error("dtype", f"{ends}: {type_name(source.datatype)} -> {type_name(use.datatype)}")
    sizes = zip(source.shape, use.shape, strict=False)
    if len(source.shape) != len(use.shape) or any(a != b and -1 not in (a, b) for a, b in sizes):
        yield ensemble.error("shape", f"{ends}: {list(source.shape)} -> {list(use.shape)}")
    if source.model == ensemble.name and source.optional and not use.optional and use.model != ensemble.name:
        end = f"{use.model}.{use.name}"
        yield ensemble.error("optional", f"optional input {source.name!r} feeds {end}, which is required")


def _decoupling(ensemble: Model, steps: list[Step]) -> Iterator[Fault]:
    if ensemble.config.HasField("model_transaction_policy"):
        problem = "Triton derives an ensemble's decoupled from its steps; do not write model_transaction_policy"
        yield ensemble.warning("decoupled", problem)
    decoupled = any(step.model.decoupled for step in steps)
    names = {tensor.name for tensor in ensemble.config.input}
    if not decoupled and names & {"stream", "streaming"}:
        yield ensemble.error("decoupled", "it takes 'stream', but no step is decoupled, so nothing can be streamed")
    if decoupled and ensemble.config.response_cache.enable:
        yield ensemble.error("decoupled", "a response cache on a decoupled ensemble: Triton refuses to load it")
    # The label rule of Triton core: a step may not mix tensors that come from a decoupled model with others.
    labels = dict.fromkeys(names, "")
    for _ in steps:
        for step in steps:
            origins = {labels[tensor] for tensor in step.inputs.values() if tensor in labels}
            label = step.model.name if step.model.decoupled else min(origins, default="")
            labels |= dict.fromkeys(step.outputs.values(), label)
    for step in steps:
        by_origin = {labels[tensor]: tensor for tensor in step.inputs.values() if tensor in labels}
        if len(by_origin) > 1:
            pairs = sorted(by_origin.items())
            mixed = ", ".join(f"{tensor!r} from {label or 'no decoupled model'}" for label, tensor in pairs)
            problem = f"step {step.model.name} mixes inputs of different decoupled origin ({mixed})"
            yield ensemble.error("decoupled", f"{problem}: Triton refuses to load it")


def downstream(steps: list[Step]) -> list[Model]:
    """Models that get a tensor which came out of a decoupled step, in step order."""
    reached: set[str] = set()
    models: dict[str, Model] = {}
    for _ in steps:  # steps may be written in any order: as many rounds as steps reach everything
        for step in steps:
            after = bool(reached & set(step.inputs.values()))
            if after:
                models.setdefault(step.model.name, step.model)
            if after or step.model.decoupled:
                reached |= set(step.outputs.values())
    return list(models.values())


def _order_and_queues(ensemble: Model, steps: list[Step]) -> Iterator[Fault]:
    after = downstream(steps)
    for model in (step.model for step in steps):
        if model not in after and not model.batches and not model.is_engine:
            problem = f"step {model.name} has no dynamic_batching, so its queue cannot be bounded"
            yield ensemble.warning("queue", problem)
    for model in after:
        if problem := _disorder(model):
            yield ensemble.error("order", f"{model.name} follows a decoupled step{problem}")
        if model.batches:
            problem = f"dynamic batching on {model.name}, after a decoupled step"
            yield ensemble.warning("order", f"{problem}: on Triton 2.51 a cancelled request leaks")
        # Not where its input says all, as that of client_watch (python_backends/cpu_engine/packed_sink.py).
        inputs = [tensor.name for tensor in model.config.input]
        if model.config.response_cache.enable and inputs != [packed_delta.WATCH]:
            problem = f"a response cache on {model.name} would answer for one stream with another's state"
            yield ensemble.error("order", problem)
    engines = [step.model for step in steps if step.model.config.backend == "tensorrtllm"]
    limited = any(field.name == INFLIGHT_LIMIT for field, _ in ensemble.config.ensemble_scheduling.ListFields())
    if engines and after and not limited:
        outruns = f"{engines[0].name} outruns {after[0].name}"
        yield ensemble.warning("queue", f"without {INFLIGHT_LIMIT} responses pile up without bound when {outruns}")
    levels = {step.model.name: step.model.config.dynamic_batching.priority_levels for step in steps}
    if any(levels.values()) and not all(levels.values()):
        lost = ", ".join(name for name, level in levels.items() if not level)
        yield ensemble.warning("priority", f"a request's priority is reset to 0 at {lost}: no priority_levels there")


def _disorder(model: Model) -> str:
    """Why the responses may change their order; "" with one instance without batching, or where Triton orders them."""
    if model.config.HasField("sequence_batching") or model.config.dynamic_batching.preserve_ordering:
        return ""
    if model.batches:
        return ": its dynamic_batching reorders chunks unless preserve_ordering"
    if model.instances is None:
        return "; say instance_group KIND_CPU count 1, or each GPU gets an instance"
    return f" with {model.instances} instances: chunks are reordered" if model.instances > 1 else ""


def _signature(ensemble: Model) -> Iterator[Fault]:
    """The public model: our names with our types, and what a text client cannot do without."""
    for side, expected in (("input", tensors.ENSEMBLE_INPUTS), ("output", tensors.ENSEMBLE_OUTPUTS)):
        known = {tensor.name: tensor for tensor in expected}
        for tensor in getattr(ensemble.config, side):
            if tensor.name in known:
                yield from contract_faults(ensemble, side, tensor, known[tensor.name])
    names = [{tensor.name for tensor in side} for side in (ensemble.config.input, ensemble.config.output)]
    if "text_input" in names[0] and not {"text_output", packed_delta.OUTPUT} & names[1]:
        yield ensemble.error("contract", "it takes text_input and has no output text_output")
