"""One thread, as every task has by default: two would fight with the tests' own worker processes."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
