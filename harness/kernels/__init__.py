"""Triton kernels, each in one file with the torch reference that is used wherever Triton or a CUDA device is absent.

Of each there are three: ``name`` chooses, ``name_reference`` is plain torch, ``name_triton`` launches the kernel. None
of them waits for the device or branches on a value that lies there, so all can be captured in a CUDA graph, after one
call outside it with the same shapes, which compiles. Axis letters as in ``harness.model``, and ``R`` rows of a
verifier's block.
"""
