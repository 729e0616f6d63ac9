"""Whether and when a request may run: budgets, concurrency limits and the fair queue of each pool."""
