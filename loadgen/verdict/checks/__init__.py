"""The named conditions under which a comparison means something; importing a module declares its checks."""

# isort: off
from loadgen.verdict.checks import run  # noqa: F401 (the order of these lines is the order in reports)
from loadgen.verdict.checks import tokens  # noqa: F401
from loadgen.verdict.checks import generator  # noqa: F401
from loadgen.verdict.checks import arms  # noqa: F401
from loadgen.verdict.checks import machine  # noqa: F401
from loadgen.verdict.checks import interpretation  # noqa: F401
