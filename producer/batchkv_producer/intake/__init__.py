"""From files, pipes and dicts to checked rows."""
