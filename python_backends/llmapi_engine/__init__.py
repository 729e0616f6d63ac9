"""The engine on TensorRT-LLM's LLM API: the CPU engine's scheduler, streams and metrics around ``LLM.generate_async``.

TensorRT-LLM 1.3 and later have no compiled engines; this kind serves the quantised Hugging Face checkpoint instead.
"""
