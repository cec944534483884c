"""Training runs: the loop, its guard, what it records and what it keeps."""
