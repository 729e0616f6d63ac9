"""What operators see: metrics, spans and log lines."""
