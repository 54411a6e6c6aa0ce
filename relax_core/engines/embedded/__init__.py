"""The embedded engine: one process, batched decoding on a CPU, SGLang's HTTP protocol on loopback."""
