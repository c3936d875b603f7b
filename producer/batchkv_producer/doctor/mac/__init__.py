"""The checks that only a Mac has. Each reads what a tool of macOS prints."""
