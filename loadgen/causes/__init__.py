"""Why the arms differ: cells in which one cause is taken away and nothing else, run beside the arm as it is.

`plan` decides what to run, `phase` runs it, `effects` measures it, `ranking` concludes; all but `phase` are pure.
"""
