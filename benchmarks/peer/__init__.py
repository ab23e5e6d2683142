"""Engines that run beside this one: set up, started, and asked in turn."""
