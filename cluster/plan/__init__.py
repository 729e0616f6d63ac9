"""The capacity planner: replicas per pool and hour for a load and its objectives, what binds, and what it costs."""
