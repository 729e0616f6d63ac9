"""Prompt templates by name and version, their budgets in tokens, and what is left out of chats that are too long."""
