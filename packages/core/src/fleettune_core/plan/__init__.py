"""The plan: everything that is decided, and said with its reason, before anything starts."""
