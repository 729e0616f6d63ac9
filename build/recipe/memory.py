"""How much memory an engine takes: weights, activations, buffers per sequence, KV cache, by published formulas.

Weights and KV cache follow from shapes. What TensorRT takes for activations and the runtime for its buffers has no
published formula; ours is fitted to the allocation lines TensorRT-LLM prints, of four published logs (its memory
documentation, issues 1188 and 3636, its benchmark guide); ``test_memory.py`` holds every one of them.
``FORMULAS`` says in words what is computed, for the plan to print.
"""

from dataclasses import dataclass

from build.base import hardware, layout
from build.base.architecture import Architecture
from build.model import lora_adapter
from build.recipe.recipe import Recipe
from build.recipe.schema import CPU
from python_backends.limits import EngineLimits

GIB = 1024**3
LORA_HEAD_SIZE = 64  # of the attention head that carries an adapter's number (lora_graph.py)
BLOCK_TOKENS = 32  # tokens of one KV block, trtllm-build's default and OpenVINO's
CONTEXT_BYTES = int(0.76 * GIB)  # CUDA context and libraries: 79.10 − 70.48 GiB less what the same log accounts for
WORKSPACE_BYTES = 32 * 1024**2
SEQUENCE_BYTES = 650_000  # per running sequence, whatever the vocabulary
SEQUENCE_VOCAB_BYTES = 24.8  # per running sequence and vocabulary entry: logits, their copies, the decoder's scratch
CPU_PROCESS_BYTES = 170 * 1024**2  # resident size of the engine process before any weight

WEIGHT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0}
WEIGHT_BYTES |= dict.fromkeys(("fp8", "fp8_pc_pt", "int8", "int8_sq", "int8_wo"), 1.0)
WEIGHT_BYTES |= dict.fromkeys(("int4", "int4_wo", "int4_awq", "w4a8_awq", "nvfp4"), 0.5)
KV_BYTES = {"auto": 2.0, "fp8": 1.0, "int8": 1.0, "f16": 2.0, "bf16": 2.0, "f32": 4.0, "u8": 1.0}

FORMULAS = {
    "weights": (
        "matrices x bytes of the precision + their scales; embedding, lm_head, norms and biases in bf16, lm_head kept "
        "apart from a tied embedding; 1/tp of every matrix and of the layers of the fullest pp stage (an engine takes "
        "about as much: TensorRT-LLM docs, Memory Usage)"
    ),
    "kv_cache": "2 x layers/pp x max(1, kv_heads/tp) x head_dim x bytes of the KV precision per token (same page)",
    "activations": (
        "32 MiB + max_num_tokens x 2 x (2 x widest/tp + h x hidden) + sequences x vocab/tp x 2, widest = the MLP or "
        "attention, h = 5 for 8-bit activations, else 2 (fitted to published logs, a little high)"
    ),
    "buffers": "sequences x (650 kB + 24.8 x vocab), sequences = max_batch_size x max_beam_width (from the same logs)",
    "context": "0.76 GiB for the CUDA context and libraries (from the same logs)",
    "kv_pool": "kv_cache_fraction x (card - all of the above), at most kv_cache_tokens, in blocks of 32 tokens",
}
FORMULAS_CPU = {
    "weights": "every matrix x bytes of the precision + 4 bytes of scale per row or group; a tied lm_head is shared",
    "kv_cache": "2 x layers x kv_heads x (head_dim x bytes of the KV precision + 8 for u8's scale and zero point)",
    "activations": "max_num_tokens x 4 x (2 x widest + 5 x hidden) + sequences x vocab x 4, in f32",
    "buffers": (
        "none without drafts; with them a second pipeline: weights, activations, and a KV cache of a quarter of "
        "kv_cache_tokens, or of one sequence of max_seq_len and its drafts; not counted: weights again, and KV caches "
        "of up to 8 sequences, from the first request for num_top_log_probs or return_prompt_log_probs on"
    ),
    "context": "170 MiB for the engine process before any weight (measured)",
    "kv_pool": "kv_cache_tokens, as the recipe says",
}


@dataclass(frozen=True)
class Footprint:
    """Bytes on the fullest rank (on the CPU: of the process). pool_tokens: KV tokens that fit beside the rest.
    available_bytes: the card's memory, None on the CPU, where the recipe itself sets the pool."""

    available_bytes: int | None
    weight_bytes: int
    activation_bytes: int
    buffer_bytes: int
    context_bytes: int
    kv_bytes_per_token: float
    pool_tokens: int

    @property
    def fixed_bytes(self) -> int:
        """Everything but the KV cache."""
        return self.weight_bytes + self.activation_bytes + self.buffer_bytes + self.context_bytes

    @property
    def pool_bytes(self) -> int:
        return int(self.pool_tokens * self.kv_bytes_per_token)

    @property
    def total_bytes(self) -> int:
        """With the whole KV cache."""
        return self.fixed_bytes + self.pool_bytes

    def sequences(self, length: int) -> int:
        """Sequences of ``length`` tokens the pool holds at once, each in whole blocks."""
        return self.pool_tokens // BLOCK_TOKENS // max(1, -(-length // BLOCK_TOKENS))


def footprint(recipe: Recipe, arch: Architecture, draft: Architecture | None = None) -> Footprint:
    """What ``recipe`` takes on its own card at its own limits. draft: of its draft model, not counted if not given."""
    weights = weight_bytes(recipe, arch) + adapter_bytes(recipe, arch)
    activations = activation_bytes(recipe, arch)
    per_token = kv_bytes_per_token(recipe, arch)
    if recipe.kind == CPU:
        second = _drafting_bytes(recipe, arch, draft) if recipe.speculative_decoding else 0
        return Footprint(None, weights, activations, second, CPU_PROCESS_BYTES, per_token, recipe.kv_cache_tokens or 0)
    buffers, card = buffer_bytes(recipe, arch), int(hardware.find(str(recipe.gpu)).memory_gib * GIB)
    free = card - weights - activations - buffers - CONTEXT_BYTES
    tokens = max(0, int(recipe.kv_cache_fraction * free / per_token))
    if recipe.kv_cache_tokens is not None:
        tokens = min(tokens, recipe.kv_cache_tokens)
    tokens -= tokens % BLOCK_TOKENS
    return Footprint(card, weights, activations, buffers, CONTEXT_BYTES, per_token, tokens)


def _drafting_bytes(recipe: Recipe, arch: Architecture, draft: Architecture | None) -> int:
    """Of the pipeline that drafts: the model again, the draft model, and KV caches of its own."""
    spec = recipe.speculative_decoding
    assert spec is not None and recipe.max_seq_len and recipe.kv_cache_tokens
    blocks = recipe.kv_cache_tokens // BLOCK_TOKENS
    sizes = arch.vocab_size, recipe.max_seq_len, recipe.max_batch_size, blocks
    tokens = EngineLimits(*sizes, max_draft_len=spec.max_draft_len).draft_pool_blocks * BLOCK_TOKENS
    models = [(recipe, arch)]
    if draft is not None:
        models.append((recipe.changed(precision=str(spec.draft_precision), adapters=()), draft))
    total = 0
    for made, of in models:
        total += weight_bytes(made, of) + adapter_bytes(made, of) + activation_bytes(made, of)
        total += int(tokens * kv_bytes_per_token(made, of))
    return total


def weight_bytes(recipe: Recipe, arch: Architecture) -> int:
    """Bytes of the fullest rank's weights."""
    return max(rank_weight_bytes(recipe, arch, stage) for stage in range(recipe.pp))


def checkpoint_bytes(recipe: Recipe, arch: Architecture) -> int:
    """Bytes of all ranks together, which is also about what the compiled engines take on disk."""
    ranks = recipe.tp * sum(rank_weight_bytes(recipe, arch, stage) for stage in range(recipe.pp))
    return ranks + adapter_bytes(recipe, arch)


def adapter_bytes(recipe: Recipe, arch: Architecture) -> int:
    """Of a CPU engine's LoRA adapters as their files store them, and their rows of embedding and lm_head."""
    files = [layout.given(adapter.path) / lora_adapter.WEIGHTS for adapter in recipe.adapters]
    rows = (1 if arch.tied else 2) * len(files) * arch.hidden_size * 4
    return rows + sum(file.stat().st_size for file in files if file.is_file())


def rank_weight_bytes(recipe: Recipe, arch: Architecture, stage: int) -> int:
    """Bytes of one rank of pipeline stage ``stage`` (0 holds the embedding, the last one lm_head)."""
    if arch.exported:
        return int(_matrix_bytes(recipe, arch.num_parameters() // arch.hidden_size, arch.hidden_size))
    layers = arch.num_layers // recipe.pp + (1 if stage < arch.num_layers % recipe.pp else 0)
    hidden, tp = arch.hidden_size, recipe.tp
    q_rows = arch.num_heads * arch.head_dim // tp
    kv_rows = kv_heads_per_rank(recipe, arch) * arch.head_dim
    mlp_rows = arch.intermediate_size // tp
    matrices = [(q_rows + 2 * kv_rows, hidden), (hidden, q_rows), *[(mlp_rows, hidden)] * 2, (hidden, mlp_rows)]
    per_layer = sum(_matrix_bytes(recipe, rows, columns) for rows, columns in matrices)
    per_layer += 2 * (2 * hidden)  # the two norms
    per_layer += 2 * (q_rows + 2 * kv_rows) * arch.qkv_bias + 2 * (2 * arch.head_dim) * arch.qk_norm
    per_layer += 2 * hidden * arch.output_bias + 2 * (2 * mlp_rows + hidden) * arch.mlp_bias

    padded = -(-arch.vocab_size // 64) * 64 if "awq" in recipe.precision else arch.vocab_size  # rule R37
    vocabulary = padded * hidden // tp
    total = layers * per_layer
    smoothed = recipe.kind == CPU and recipe.precision == "int8_sq"  # a bf16 embedding, and an 8-bit head of its own
    if stage == 0:
        total += 2 * vocabulary if smoothed else _embedding_bytes(recipe, vocabulary, hidden)
    own_head = smoothed and recipe.head_precision == "int8"
    if stage == recipe.pp - 1 and (own_head or not (recipe.kind == CPU and arch.tied)):
        head_in_8_bits = recipe.precision == "fp8" and recipe.quantize.get("quantize_lm_head") is True
        total += vocabulary if head_in_8_bits else _embedding_bytes(recipe, vocabulary, hidden)
    return int(total)


def kv_heads_per_rank(recipe: Recipe, arch: Architecture) -> int:
    """With fewer KV heads than ranks every rank holds a copy of one."""
    return max(1, arch.num_kv_heads // recipe.tp)


def kv_bytes_per_token(recipe: Recipe, arch: Architecture) -> float:
    """Bytes one token takes on the fullest rank."""
    layers = -(-arch.num_layers // recipe.pp)
    scale_bytes = 8 if recipe.kv_cache_precision == "u8" else 0
    per_head = arch.head_dim * KV_BYTES[recipe.kv_cache_precision] + scale_bytes
    adapter_head = LORA_HEAD_SIZE * KV_BYTES[recipe.kv_cache_precision] + scale_bytes if recipe.adapters else 0
    return 2 * (layers * kv_heads_per_rank(recipe, arch) * per_head + adapter_head)


def kv_arithmetic(recipe: Recipe, arch: Architecture) -> str:
    """``kv_bytes_per_token`` with its numbers in place."""
    layers, heads = -(-arch.num_layers // recipe.pp), kv_heads_per_rank(recipe, arch)
    size = f"{KV_BYTES[recipe.kv_cache_precision]:g}"
    per_head = f"({arch.head_dim} x {size} + 8)" if recipe.kv_cache_precision == "u8" else f"{arch.head_dim} x {size}"
    return f"2 x {layers} x {heads} x {per_head} = {kv_bytes_per_token(recipe, arch):g} bytes per token"


def activation_bytes(recipe: Recipe, arch: Architecture) -> int:
    """Upper bound of what one step of max_num_tokens needs on one rank, all kernels' workspaces included."""
    attention = (2 * arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
    widest = max(arch.intermediate_size, attention // 2) / recipe.tp
    if recipe.kind == CPU:
        per_token = 4 * (2 * widest + 5 * arch.hidden_size)
        return int(recipe.max_num_tokens * per_token + recipe.max_batch_size * arch.vocab_size * 4)
    hidden_copies = 5 if recipe.precision in ("fp8", "fp8_pc_pt", "w4a8_awq", "int8_sq", "nvfp4") else 2
    per_token = 2 * (2 * widest + hidden_copies * arch.hidden_size)
    gathered = any(recipe.build.get(key) for key in ("gather_context_logits", "gather_all_token_logits"))
    logits_rows = recipe.max_num_tokens if gathered else recipe.max_batch_size * recipe.max_beam_width
    logits = logits_rows * arch.vocab_size / recipe.tp * 2
    return int(WORKSPACE_BYTES + recipe.max_num_tokens * per_token + logits)


def buffer_bytes(recipe: Recipe, arch: Architecture) -> int:
    """What the runtime and its decoder keep for every sequence that may run."""
    sequences = recipe.max_batch_size * recipe.max_beam_width
    return int(sequences * (SEQUENCE_BYTES + SEQUENCE_VOCAB_BYTES * arch.vocab_size))


def _matrix_bytes(recipe: Recipe, rows: int, columns: int) -> float:
    size = rows * columns * WEIGHT_BYTES[recipe.precision]
    if recipe.precision in ("int4_awq", "w4a8_awq"):  # a 16-bit scale per group and a prequant factor per column
        return size + 2 * rows * columns / recipe.group_size + 2 * columns
    if recipe.precision == "int4":
        return size + 4 * rows * columns / recipe.group_size
    if recipe.precision == "nvfp4":  # an 8-bit scale per 16 weights
        return size + rows * columns / 16
    if recipe.precision in ("int8", "int8_sq", "int8_wo", "int4_wo", "fp8_pc_pt"):
        return size + 4 * rows
    return size


def _embedding_bytes(recipe: Recipe, elements: int, hidden: int) -> float:
    """16 bits on a GPU; the CPU's int8 and int4 keep embedding and head in 8 bits with a scale per row, or in 16."""
    if recipe.kind != CPU:
        return 2 * elements
    width = WEIGHT_BYTES[recipe.precision]
    if width < 2 and recipe.head_precision == "bf16":
        return 2 * elements
    return elements * width if width >= 2 else elements + 4 * elements / hidden
