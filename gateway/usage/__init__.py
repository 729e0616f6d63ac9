"""What requests used and cost: calendar periods, the ledger of requests, and reports of it."""
