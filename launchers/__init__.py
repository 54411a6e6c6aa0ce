"""Where one run executes."""
