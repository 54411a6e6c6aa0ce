"""The model families: what the language model of a Hugging Face folder consists of. Nothing here imports torch.

Start reading in `table.py`; trainer, embedded engine and memory plan use the same `Architecture`.
"""
