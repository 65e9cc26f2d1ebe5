"""What changes how gradients become weights: accumulation, compression, local SGD, parameter groups."""
