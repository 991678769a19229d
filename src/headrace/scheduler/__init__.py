"""What runs in each step. Pure Python, no tensors: it can be driven through millions of steps without a model."""
