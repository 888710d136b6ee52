"""The weight gradient of a convolution: vendor detours, our kernels, CUTLASS's."""
