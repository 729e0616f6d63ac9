"""How is a public request served? Files in the order of the flow.

settings → schemas → app (chat, completions, kserve) → permit (admission) → routing → streaming → observability
"""
