"""The decode slots: which row owns which columns, and which of them a step reads. No weights."""
