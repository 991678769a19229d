"""Measurements of an engine, of servers and of the machine, and a simulator of the scheduler."""
