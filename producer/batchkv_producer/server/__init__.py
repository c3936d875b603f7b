"""The embedded server, and how every command reaches one."""
