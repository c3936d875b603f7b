"""The embedded server, and the connection of every command to its server."""
