"""How many replicas a pool needs: one law, the reader of what it needs to know, and the plan for people."""
