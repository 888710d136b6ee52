"""What calls of operators with an index need besides: gradients, index_put, other dtypes."""
