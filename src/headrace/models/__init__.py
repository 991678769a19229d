"""One decoder; a model family is data for it."""
