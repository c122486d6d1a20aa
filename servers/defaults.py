"""Default values that several servers and commands share. Imports no other module of the project."""

from typing import Final

HOST = "127.0.0.1"
PRECISION: Final = "auto"
MODE = "auto"
DEVICE = "auto"
MAX_BATCH_SIZE = 32
MAX_QUEUE_DELAY_US = 2000
QUEUE_SIZE = 512
ARTEFACTS = ".artefacts"
