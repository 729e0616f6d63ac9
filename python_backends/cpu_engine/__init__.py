"""The engine on a CPU: OpenVINO GenAI's continuous batching behind TensorRT-LLM's tensor contract.

A request passes: model (Triton's thread), request, engine (scheduler, one lock), link, worker (a process with the step
loop), engine (step reports come back), response_senders, Triton.
"""
