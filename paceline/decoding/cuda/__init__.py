"""Kernels in Triton for CUDA devices, and the test that says whether a device can use them."""
