"""One rank: owns device memory, builds a step's tensors, runs the model, samples."""
