"""What a person reads: console lines, the comparison of two runs, plans and checkpoints as tables."""
