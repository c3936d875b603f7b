"""The HTTP side: routes, keys of requests, limits, errors in OpenAI's shape, the server."""
