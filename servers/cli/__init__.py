"""What the commands of all servers share: options, launch plans, default values; and `abserve doctor` and `serve`."""
