"""Which blocks of the KV cache belong to whom. No tensors here: a block is a number."""
