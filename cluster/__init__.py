"""What runs a cluster of replicas and gateways: how many of them, started by Ray or by Kubernetes."""
