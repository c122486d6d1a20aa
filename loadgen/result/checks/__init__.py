"""The named conditions under which a comparison means something, in the order in which they are shown."""

# isort: off
from loadgen.result.checks import gpu  # noqa: F401 (importing a module declares its checks)
from loadgen.result.checks import run  # noqa: F401
from loadgen.result.checks import generator  # noqa: F401
from loadgen.result.checks import arms  # noqa: F401
from loadgen.result.checks import machine  # noqa: F401
from loadgen.result.checks import interpretation  # noqa: F401
