"""`LLM` for programs, `AsyncEngine` for servers (in a process of its own), and the step loop that both run."""
