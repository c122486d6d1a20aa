"""From stored GPU readings to a verdict on where an arm ran. Pure: reads nothing but files, starts nothing."""
