"""Hooks: Python code of the operator's that is called for every request, bounded in time and isolated in failure."""
