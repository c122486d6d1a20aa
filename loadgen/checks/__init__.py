"""The named conditions under which a comparison means something; importing a module declares its checks."""

# isort: off
from loadgen.checks import gpu  # noqa: F401 (the order of these lines is the order in reports)
from loadgen.checks import run  # noqa: F401
from loadgen.checks import tokens  # noqa: F401
from loadgen.checks import generator  # noqa: F401
from loadgen.checks import arms  # noqa: F401
from loadgen.checks import machine  # noqa: F401
from loadgen.checks import interpretation  # noqa: F401
