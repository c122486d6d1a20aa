"""Measurements of this machine that later runs use: calibration and noise floor."""
