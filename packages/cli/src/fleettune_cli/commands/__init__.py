"""One module per command of `ft`, imported only when that command runs or its own help is shown."""
