"""How an architecture (relax_core/families) looks in Megatron. Nothing here imports torch."""
