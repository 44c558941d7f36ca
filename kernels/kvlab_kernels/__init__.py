"""Triton kernels that read a compressed KV cache directly. Needs torch; the kernels themselves need triton."""
