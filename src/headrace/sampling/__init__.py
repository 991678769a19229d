"""From logits to a token: parameters, filters, counter-based random numbers, logprobs."""
