"""``batchkv doctor``: facts by tiny commands, verdicts as pure functions of facts."""
