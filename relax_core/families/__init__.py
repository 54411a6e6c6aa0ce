"""Model families: what a Hugging Face folder's language model is made of. Trainer, embedded engine and memory plan read
the same description. Nothing here imports torch."""
