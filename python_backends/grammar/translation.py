"""Every kind of guide as one that the engine's library compiles as it is meant."""

from __future__ import annotations

from contract.errors import InvalidArgument
from contract.generation import Guide
from python_backends.grammar.messages import Check, Checked


def translate(guide: Guide) -> Guide:
    """Return a guide of the kind ebnf_grammar, or structural_tag.

    Raises:
        InvalidArgument: it cannot be expressed exactly; names the place.
    """
    return guide


def translated(requested: Check) -> Checked:
    """Translate a guide for an engine whose library compiles it elsewhere."""
    try:
        return Checked(translate(requested.guide))
    except InvalidArgument as exc:
        return Checked(field=exc.field, problem=exc.problem)
