"""Whether the arms are alike and the machine is idle, before anything is measured."""
