"""Every figure that the README quotes, as a command: ``python -m benchmarks.<name>``."""
