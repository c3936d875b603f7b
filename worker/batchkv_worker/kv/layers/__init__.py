"""What each kind of layer keeps, from prefill to decode slot to stored block."""
