"""Shared fixtures. Tensor shapes in the signatures of the decoder and the model are checked while tests run."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may wait for a network

import torch
from jaxtyping import install_import_hook

# What else is measured on this machine is no test's business.
os.environ["HARNESS_OCCUPANCY"] = tempfile.mkdtemp()
atexit.register(shutil.rmtree, os.environ["HARNESS_OCCUPANCY"], ignore_errors=True)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which nothing above does

# The hook stays installed: it checks every module of these packages imported from here on.
install_import_hook(
    [
        *("harness.model", "harness.decode", "harness.drafters", "harness.kernels", "harness.sampling"),
        *("harness.dimr", "harness.divergence", "harness.rescore", "harness.audit.judge"),
    ],
    "beartype.beartype",
)

torch.set_num_threads(1)
