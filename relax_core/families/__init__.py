"""The room says what the language model of a Hugging Face folder is made of. Trainer, embedded engine and memory plan
read the same description. Nothing here imports torch."""
