"""How tokens are made on a CPU: OpenVINO GenAI's continuous batching behind TensorRT-LLM's tensor contract.

A request's way: model (Triton's thread) → request → engine (admission, one lock) → worker (a process with the
step loop) → engine (steps come back) → senders (sender threads) → Triton.
"""
