"""What holds for all tests, and for every program that they start.

One thread before any torch operation: a parent that has run a two-threaded one hangs the ranks it forks. And this
checkout before any other: the environment that runs the tests may have been made for another one.
"""

import os
import signal
import sys
from pathlib import Path

import torch

from tests.s3 import s3 as s3

ROOT = str(Path(__file__).resolve().parent.parent)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
sys.path.insert(0, ROOT)

torch.set_num_threads(1)

# A shell starts what it runs in the background with SIGINT ignored, and programs inherit that: the tests that interrupt
# one need the default.
signal.signal(signal.SIGINT, signal.default_int_handler)
