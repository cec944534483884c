"""One thread before any torch operation: a parent that has run a two-threaded one hangs the ranks it forks."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
