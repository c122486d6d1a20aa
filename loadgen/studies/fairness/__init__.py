"""Whether the arms are alike and the machine is fit, before anything is measured."""
