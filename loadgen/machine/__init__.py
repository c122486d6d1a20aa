"""What was found out about this machine and is kept for later runs: calibration, noise floor."""
