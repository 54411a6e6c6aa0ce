"""The nouns every room shares. Imports nothing of Relax; everything else may import it."""
