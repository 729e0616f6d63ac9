"""What the operator sets: environment variables and the configuration file, reloaded while it runs."""
