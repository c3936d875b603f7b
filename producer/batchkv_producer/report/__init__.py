"""The facts of one batch, its charts, and its report as one HTML file."""
