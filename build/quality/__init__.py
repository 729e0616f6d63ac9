"""The quality gate: measures a quantised model against the checkpoint it came from."""
