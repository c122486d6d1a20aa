"""Where models come from: each module of this package is one source, found by its name.

A source has `names()`, the well-known models for `abserve models`, and `specify(name)`, the specification of
SOURCE:NAME, or None if it has no such model; it raises `UnknownModelError` for one that it cannot serve. A source of
files also has `takes(reference)`: whether a reference without a source's name, such as a path, belongs to it; `specify`
then gets the whole reference. A source with more models than the well-known ones has `all_names()`.
"""
