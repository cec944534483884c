"""From text to batches: the cycle corpus, prepared token files, the stateless loader, the held-out part."""
