"""Several LoRA adapters inside one graph, chosen per sequence by the id of its first token.

With V tokens and N adapters an id stands for a token and, at a sequence's first position, for an adapter too
(python_backends/adapters.py). The number of the adapter reaches every later token of the sequence through one more
attention head of the KV cache: its key is far above all others at the marked token, its value is the adapter's one-hot.
The head's output chooses among the adapters' low-rank products, which all adapters of a matrix share:

    y = W x + [B_1 .. B_N] (g * [A_1; ..; A_N] x)

Embedding and logits have N rows more, so that penalties on the prompt's ids accept V + a; the logits' are far below
all others.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import openvino as ov
import openvino.opset13 as ops
from openvino import Node

from build.base.checkpoint import Checkpoint
from build.base.numerics import f32_to_bf16
from build.base.shards import StoredTensor
from build.model.graph import f32, i64
from build.model.lora_adapter import LoraAdapter
from build.model.weights import EMBEDDING, HEAD, Weights, quantize_int8

_HEAD_SIZE = 64  # one entry for "no adapter", so up to 63 adapters
_MULTIPLE = 16  # of columns: the CPU's blocks
_MOST_ZEROS = 65536  # of B, beside rows of another matrix: more of them cost more than one product more
_FEW_RANKS = 64  # a product with fewer takes as long in int8 as in bf16
_FAR = 40.0  # exp(-80) is nothing beside any number of tokens, and u8 keys hold 40 and -40 well
_NEVER = -1e9  # logit of an id that is no token, whatever penalties make of it


@dataclass(frozen=True)
class _Part:
    """What all adapters add to one matrix. a: f32[ranks, in]. b: f32[out, ranks]. owners: the adapter of each rank."""

    a: np.ndarray
    b: np.ndarray
    owners: list[int]


@dataclass(frozen=True)
class _Widened:
    """A stored matrix with copies of one of its rows after the last."""

    stored: StoredTensor
    copies: int
    row: int

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stored.shape[0] + self.copies, *self.stored.shape[1:])

    def raw(self) -> np.ndarray:
        return self._with_copies(self.stored.raw())

    def f32(self) -> np.ndarray:
        return self._with_copies(self.stored.f32())

    def _with_copies(self, values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, np.repeat(values[self.row : self.row + 1], self.copies, 0)])


def widened(checkpoint: Checkpoint, adapters: int, first_token_id: int) -> Checkpoint:
    """The checkpoint with one more row of embedding and lm_head per adapter, a copy of the first token's."""
    tensors = {
        name: _Widened(tensor, adapters, first_token_id) if name in (EMBEDDING, HEAD) else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    return dataclasses.replace(checkpoint, tensors=tensors)  # type: ignore[arg-type]


class LoraGraph:
    """The hook of ``graph.decoder``. Owns arrays that the graph shares: keep it until it is saved."""

    head_size = _HEAD_SIZE  # of the attention head that tells every token its sequence's adapter

    def __init__(self, adapters: Sequence[LoraAdapter], vocab_size: int, weights: Weights, exact: bool) -> None:
        """vocab_size: without the adapters' rows. weights: of the model. exact: adapters in f32, else as is fastest."""
        self._adapters, self._weights, self._vocab_size, self._exact = adapters, weights, vocab_size, exact
        self._masks: dict[tuple[int, ...], Node] = {}
        self._shared: list[object] = []
        self._gate: Node

    def rows(self, ids: Node, attend: Callable[[Node, Node, Node], Node]) -> Node:
        """The embedding's row of each id; called first, once."""
        rows_per_adapter = i64(self._vocab_size + len(self._adapters))
        rows = ops.mod(ids, rows_per_adapter)
        marked = ops.maximum(ops.subtract(rows, i64(self._vocab_size - 1)), i64(0))  # V + a -> a + 1
        number = ops.add(marked, ops.divide(ids, rows_per_adapter))  # i64[B, L], 0 without an adapter
        axis = np.zeros((1, 1, 1, _HEAD_SIZE), np.float32)
        axis[..., 0] = 1
        has_number = ops.unsqueeze(ops.convert(ops.minimum(number, i64(1)), ov.Type.f32), i64([1, 3]))  # [B, 1, L, 1]
        key = ops.multiply(ops.subtract(ops.multiply(has_number, f32(2 * _FAR)), f32(_FAR)), f32(axis))
        query = ops.add(ops.multiply(key, f32(0.0)), f32(axis))
        value = ops.unsqueeze(ops.one_hot(number, i64(_HEAD_SIZE), f32(1.0), f32(0.0), -1), i64(1))
        self._gate = ops.round(attend(query, key, value), "half_to_even")  # exactly 0 or 1, whatever the cache's format
        return rows

    def products(self, x: Node, names: Sequence[str], plain: Callable[[], list[Node]]) -> list[Node]:
        """``x``'s products with the matrices ``names``, every adapter's part added. plain: without adapters."""
        parts = [self._part(name) for name in names]
        if not any(part.owners for part in parts):
            return plain()
        if self._exact or not self._weights.can_fold():
            return self._added(x, parts, plain())
        return self._folded(x, names, parts)

    def _added(self, x: Node, parts: Sequence[_Part], products: list[Node]) -> list[Node]:
        """The formula as it stands: exact, and two small products per matrix."""
        adapted = [index for index, part in enumerate(parts) if part.owners]
        low = self._low(x, np.concatenate([part.a for part in parts]), [o for part in parts for o in part.owners])
        ranks = [len(parts[index].owners) for index in adapted]
        for index, own in zip(adapted, _split(low, ranks), strict=True):
            lift = ops.matmul(own, self._constant(parts[index].b), False, True)
            products[index] = ops.add(products[index], lift)
        return products

    def _folded(self, x: Node, names: Sequence[str], parts: Sequence[_Part]) -> list[Node]:
        """Products [x, g * A x] [W, B]^T of whole groups: a small product costs about as much as a large one."""
        groups, weights, a, owners = _groups(parts), [], [], []
        for group in groups:
            own = parts[group]
            padded = -(-_ranks(own) // _MULTIPLE) * _MULTIPLE
            columns = np.zeros((sum(len(part.b) for part in own), padded), np.float32)
            row = rank = 0
            for part in own:
                columns[row : row + len(part.b), rank : rank + len(part.owners)] = part.b
                row, rank = row + len(part.b), rank + len(part.owners)
            weight, divisors = self._weights.folded(names[group], columns)
            stacked = np.zeros((columns.shape[1], parts[0].a.shape[1]), np.float32)
            stacked[:rank] = np.concatenate([part.a for part in own])
            weights.append(weight)
            a.append(stacked * divisors[:, None])
            owners += [owner for part in own for owner in part.owners] + [0] * (len(stacked) - rank)
        low = self._low(x, np.concatenate(a), owners)
        lows = iter(_split(low, [len(stacked) for stacked in a if len(stacked)]))
        products = []
        for group, weight, stacked in zip(groups, weights, a, strict=True):
            both = ops.concat([x, next(lows)], -1) if len(stacked) else x
            products += _split(ops.matmul(both, weight, False, True), [len(part.b) for part in parts[group]])
        return products

    def _part(self, name: str) -> _Part:
        """What the adapters add to one matrix."""
        rows, columns = self._weights.shape(name)
        having = [(a, one.matrices[name]) for a, one in enumerate(self._adapters) if name in one.matrices]
        return _Part(
            np.concatenate([np.zeros((0, columns), np.float32), *(matrix.a for _, matrix in having)]),
            np.concatenate([np.zeros((rows, 0), np.float32), *(matrix.b for _, matrix in having)], axis=1),
            [a for a, matrix in having for _ in matrix.a],
        )

    def _low(self, x: Node, a: np.ndarray, owners: Sequence[int]) -> Node:
        """f32[B, L, ranks]: A x, 0 where another adapter owns the rank."""
        return ops.multiply(ops.matmul(x, self._constant(a), False, True), self._mask(tuple(owners)))

    def logits(self, logits: Node) -> Node:
        """The logits without the ids that stand for adapters."""
        bias = np.zeros((1, 1, self._vocab_size + len(self._adapters)), np.float32)
        bias[..., self._vocab_size :] = _NEVER
        return ops.add(logits, f32(bias))

    def _mask(self, owners: tuple[int, ...]) -> Node:
        """f32[B, L, ranks]: 1 where the sequence's adapter owns the rank."""
        if owners not in self._masks:
            chosen = np.zeros((_HEAD_SIZE, len(owners)), np.float32)
            chosen[[owner + 1 for owner in owners], range(len(owners))] = 1
            self._masks[owners] = ops.matmul(self._gate, f32(chosen), False, False)
        return self._masks[owners]

    def _constant(self, values: np.ndarray) -> Node:
        if self._exact:
            return f32(values)
        if len(values) >= _FEW_RANKS and self._weights.precision == "int8":
            return self._weights.int8(quantize_int8(values))
        bits = f32_to_bf16(values)
        tensor = ov.Tensor(bits, ov.Shape(bits.shape), ov.Type.bf16)  # shares the array without holding it
        self._shared += [bits, tensor]
        return ops.convert(ops.constant(tensor, shared_memory=True), ov.Type.f32)


def _ranks(parts: Sequence[_Part]) -> int:
    return sum(len(part.owners) for part in parts)


def _groups(parts: Sequence[_Part]) -> list[slice]:
    """Neighbours that share a product: as many as leave it few zeros."""
    ends = [0]
    for end in range(1, len(parts) + 1):
        own = parts[ends[-1] : end]
        rows = sum(len(part.b) for part in own)
        if rows * _ranks(own) - sum(part.b.size for part in own) > _MOST_ZEROS:
            ends.append(end - 1)
    return [slice(start, end) for start, end in pairwise([*ends, len(parts)])]


def _split(x: Node, sizes: list[int]) -> list[Node]:
    """Along the last axis."""
    return list(ops.variadic_split(x, i64(-1), i64(sizes)).outputs()) if len(sizes) > 1 else [x]
