"""`LLM` for programs, `AsyncEngine` for servers, and the step loop that both run."""
