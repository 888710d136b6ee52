"""What calls of operators with an index need besides: ranges, gradients, parts, other dtypes."""
