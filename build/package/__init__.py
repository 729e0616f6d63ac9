"""The stages of a build: plan, compile, the files Triton needs, and how an engine's folder is replaced."""
