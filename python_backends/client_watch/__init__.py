"""The client_watch model: tells the engine when the client of a packed stream has disconnected."""
