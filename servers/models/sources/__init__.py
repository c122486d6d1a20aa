"""Where models come from: each module of this package is one source, found by its name.

A source has `names()`, the well-known models for `abserve models`, and `specify(name)`, the specification of
SOURCE:NAME, or None if it has no such model. A source of files also has `takes(reference)`: whether a reference
without a source's name, such as a path, belongs to it; `specify` then gets the whole reference.
"""
