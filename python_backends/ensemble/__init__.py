"""The messages that the three models of the ensemble exchange beside Triton's tensors."""
