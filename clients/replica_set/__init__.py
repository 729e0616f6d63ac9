"""Many replicas as one: what ``BalancedClient`` and the gateway build on.

Every module here is public: ``discovery`` (where the replicas are), ``replica`` and ``replica_set`` (discovered,
checked, let go), ``picks`` (routing policies), ``costs`` and ``reservation`` (work in progress, in tokens).
"""
