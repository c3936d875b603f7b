"""From a request to tokens, and from sampled tokens to its answer."""
