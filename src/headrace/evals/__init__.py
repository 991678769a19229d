"""What a model is worth: perplexity, and how far it is from another, through the worker that serves it."""
