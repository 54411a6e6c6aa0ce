"""The contract between rewards and judges of answers."""
