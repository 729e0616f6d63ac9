"""The messages that the models of the ensemble and the engine's worker exchange."""
