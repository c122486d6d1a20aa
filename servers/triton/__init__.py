"""A real tritonserver without a container, an installed one or the wheel's: find it, lay out a repository, launch it.

Not in scope: Triton in a container, which `docker/` starts.
"""
