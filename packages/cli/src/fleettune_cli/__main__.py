"""`python -m fleettune_cli`: the same as `ft`."""

from __future__ import annotations

from fleettune_cli.main import main

if __name__ == "__main__":
    main()
