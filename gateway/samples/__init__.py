"""Samples of requests, by opt-in and redacted, their feedback, and checks of answers that keep no text."""
