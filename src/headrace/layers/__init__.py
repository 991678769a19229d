"""The parts that a decoder is made of: which weights they hold and in which order they call the ops."""
