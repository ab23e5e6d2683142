"""Tensor functions: each has a plain torch definition and faster kernels behind one public name.

Imports neither `engine` nor `app`. A module is one operation; `kernels.attention` holds the paged attention backends.
"""
