"""KEDA's external scaler: tells Kubernetes how many replicas a pool needs."""
