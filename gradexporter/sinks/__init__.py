"""Where a published snapshot goes: one file a destination, none knows another."""
