"""What SGLang's server lacks on a CPU: active only in its processes, and only where its environment has no GPU."""
