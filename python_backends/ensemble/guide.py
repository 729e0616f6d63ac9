"""A request's guide: the tokenizer reads it for a TensorRT-LLM engine, other engines read it themselves."""

from __future__ import annotations

from contract.errors import InvalidArgument
from contract.generation import Guide
from python_backends.triton_io import Inputs


def read_guide(inputs: Inputs, min_tokens: int, ends: bool) -> Guide | None:
    """Return the guide, None without one.

    ends: the request has ids that end it.

    Raises:
        InvalidArgument: it is malformed, or contradicts the rest of the request.
    """
    kind, text = inputs.text("guided_decoding_guide_type"), inputs.text("guided_decoding_guide")
    if not kind:
        if text:
            raise InvalidArgument("guided_decoding_guide_type", "must be sent with guided_decoding_guide, got none")
        return None
    guide = Guide(kind, text or "").validate()
    # Beyond the grammar's end nothing is left to generate but the end.
    if not ends:
        raise InvalidArgument("ignore_eos", "must be false with a guide (and end_id not -1), got true")
    if min_tokens:
        problem = f"must be 0 with a guide, which decides where the output ends, got {min_tokens}"
        raise InvalidArgument("min_tokens", problem)
    return guide
