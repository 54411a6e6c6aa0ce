"""Commands of `relax` beside the run itself: list, doctor."""
