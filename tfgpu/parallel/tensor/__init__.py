"""Tensor parallelism: layers whose kernels are split over devices."""
