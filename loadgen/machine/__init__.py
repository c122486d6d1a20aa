"""What is known about this machine and kept for later runs: calibration and noise floor."""
