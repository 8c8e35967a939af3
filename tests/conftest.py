"""One thread for each test process: the ranks of a distributed test share the machine's few cores."""

import os

import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
torch.set_num_threads(1)
