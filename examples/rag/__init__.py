"""Answers with citations: an orchestrator over retrieval, tools and two models behind one gateway."""
