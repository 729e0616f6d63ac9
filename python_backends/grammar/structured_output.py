"""A guide in the form of OpenVINO GenAI; apart, since the engine's worker starts sooner without the rest."""

from __future__ import annotations

import openvino_genai as genai

from contract.generation import Guide


def structured_output(guide: Guide) -> genai.StructuredOutputConfig:
    """Return the form that a GenerationConfig holds. guide: as translated, a grammar or a structural tag."""
    field = "structural_tags_config" if guide.kind == "structural_tag" else "grammar"
    return genai.StructuredOutputConfig(**{field: guide.text})
