"""Where models come from: each module of this package is one source, found by its name.

A source has `specify(name)`, the specification of SOURCE:NAME, or None if it has no such model; it raises
`UnknownModelError` for one that it cannot serve. A library of models also has `names()`, the well-known ones for
`abserve models`, and `all_names()` if it has more. A source of files has `takes(reference)`: whether a reference
without a source's name, such as a path, belongs to it; `specify` then gets the whole reference.
"""
