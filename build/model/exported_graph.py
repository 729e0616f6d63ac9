"""The f32 graph that optimum-intel wrote, with its matrices stored as a recipe says.

What is compressed are the constants that a matrix product or an embedding reads; ``weights.py`` decides how, as for the
graphs of ``graph.py``. Norms, biases and what is computed from positions stay f32.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import openvino as ov
from openvino import Node

from build.base.checkpoint import Checkpoint
from build.base.json_fields import CheckpointError
from build.base.shards import StoredTensor
from build.model.graph import Weight
from build.model.weights import EMBEDDING, HEAD

_LEAST = 16  # rows and columns of a matrix; smaller ones are tables of the rotary embedding and the like


@dataclass(frozen=True)
class ConstantTensor(StoredTensor):
    """A matrix inside the graph, f32[out, in], or one per expert, f32[experts, out, in]."""

    node: Node = field(compare=False, default=None)

    def raw(self) -> np.ndarray:
        return self.f32()

    def f32(self) -> np.ndarray:
        values: np.ndarray = self.node.data
        return values


@dataclass(frozen=True)
class ExportedGraph:
    """A model that was read and not yet changed, and its matrices by name."""

    model: ov.Model
    constants: dict[str, Node]

    def with_weights(self, matrix: Weight) -> ov.Model:
        """The model, reading every matrix from ``matrix(name)`` in place of its own constant."""
        for name, constant in self.constants.items():
            readers, stored = list(constant.output(0).get_target_inputs()), matrix(name)
            for reader in readers:
                reader.replace_source_output(stored.output(0))
        return self.model


def matrices(checkpoint: Checkpoint) -> tuple[Checkpoint, ExportedGraph]:
    """``checkpoint`` with the graph's matrices as its tensors, and the graph they belong to."""
    assert checkpoint.graph is not None
    path = checkpoint.graph / "openvino_model.xml"
    model = ov.Core().read_model(path)
    constants: dict[str, Node] = {}
    for node in model.get_ordered_ops():
        if _is_matrix(node):
            constants[_name(node, checkpoint.architecture.vocab_size, constants)] = node
    if not constants:
        raise CheckpointError(f"{path}: the exported graph has no matrices that can be compressed")
    tensors = {name: ConstantTensor(path, name, "F32", tuple(node.shape), 0, node) for name, node in constants.items()}
    return replace(checkpoint, tensors=tensors), ExportedGraph(model, constants)


def _is_matrix(node: Node) -> bool:
    if node.get_type_name() != "Constant" or node.get_element_type() != ov.Type.f32:
        return False
    if len(node.shape) not in (2, 3) or min(node.shape[-2:]) < _LEAST:
        return False
    readers = list(node.output(0).get_target_inputs())
    reading = [reader for reader in readers if reader.get_node().get_type_name() != "ShapeOf"]
    return bool(reading) and all(_reads_rows(reader.get_node(), reader.get_index()) for reader in reading)


def _reads_rows(reader: Node, port: int) -> bool:
    """A product with the rows of its second input, or a lookup of rows."""
    if reader.get_type_name() == "MatMul":
        return port == 1 and bool(reader.get_attributes()["transpose_b"])
    return reader.get_type_name() == "Gather" and port == 0


def _name(node: Node, vocab_size: int, taken: dict[str, Node]) -> str:
    if node.shape[0] == vocab_size:
        looked_up = any(r.get_node().get_type_name() == "Gather" for r in node.output(0).get_target_inputs())
        name = EMBEDDING if looked_up else HEAD
        if name not in taken:
            return name
    name = node.get_friendly_name()
    return name if name not in taken else f"{name}#{len(taken)}"
