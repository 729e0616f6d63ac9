"""A real fleet on this machine, faults drawn from a seed, and what must hold whatever breaks (docs/chaos.md)."""
