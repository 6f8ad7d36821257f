"""Built-in backends, registered through entry points exactly like a third party's."""
