"""A foreign layer becomes a SoftmaxAttention here, one file per library."""
