"""OpenAI's files and batches over HTTP, in front of the same queue as the CLI. No MLX.

A producer that listens: it keeps files in a folder and their facts in Redis, and hands batches to
the producer's submit. `docs/gateway.md` describes it for users.
"""
