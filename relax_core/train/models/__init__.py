"""The modules say how an architecture (relax_core/families) looks in Megatron. Nothing here imports torch."""
