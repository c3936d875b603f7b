"""The page at ``/``: its files, its sessions, and the events that keep it up to date."""
