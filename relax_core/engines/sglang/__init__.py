"""SGLang as an engine: an external server process that we start and watch, or one that a user runs."""
