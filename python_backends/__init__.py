"""What runs inside Triton: the tokenizer, the CPU engine and the detokenizer.

Each model's ``1/model.py`` is one import line of a class in here; all of it runs without Triton in tests.
"""
