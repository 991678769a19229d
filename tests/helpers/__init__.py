"""What several tests share. Each topic has its own module here: `from helpers.<topic> import ...`."""
