"""What a run would be, computed before anything starts: processes, placement, batches, memory. No torch, no Ray."""
