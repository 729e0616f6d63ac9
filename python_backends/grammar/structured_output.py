"""A guide in the form of OpenVINO GenAI; apart, since the engine's worker starts sooner without the rest."""

from __future__ import annotations

import openvino_genai as genai

from contract.generation import Guide

_FIELDS = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tags_config",
}


def structured_output(guide: Guide) -> genai.StructuredOutputConfig:
    """Return the form that a GenerationConfig holds."""
    if guide.kind == "json":
        return genai.StructuredOutputConfig(json_schema='{"type": "object"}')
    return genai.StructuredOutputConfig(**{_FIELDS[guide.kind]: guide.text})
