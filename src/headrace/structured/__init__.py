"""Output that keeps to a grammar: a JSON schema, a regular expression, a list of choices, or a grammar as such."""
