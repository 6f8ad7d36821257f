"""Plugins: what is installed, whether it is sound, which one runs, and how its hooks are called.

trouble.py    what can be wrong with a plugin, as a record
catalog.py    names, read from metadata alone
loading.py    import one plugin and check it against the contract
options.py    a plugin's own settings, typed and strict
detection.py  ask the launchers what they see in the environment
selection.py  the pure choice of launcher and backend
relay.py      this run's hook calls
"""
