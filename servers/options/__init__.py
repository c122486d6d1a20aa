"""What the commands of all servers share: options from settings, launch plans, default values, what a search tries."""
